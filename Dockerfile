# The demo, or any command:
#   docker build -t koffline .
#   docker run --rm -v "$PWD:/work" koffline                    the demo; its report is left in out/demo
#   docker run --rm koffline train --list                       any command
#   docker run --rm -v "$PWD:/work" koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99 --out answer
# Files belong to root, unless `--user "$(id -u):$(id -g)"` is given.
FROM python:3.12-slim

# torch without CUDA: a tenth of the size
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    OMP_NUM_THREADS=1

COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY koffline /src/koffline
COPY configs /src/configs
COPY datasets /src/datasets
RUN pip install --constraint /src/constraints.txt /src && rm -r /src

WORKDIR /work
ENTRYPOINT ["koffline"]
CMD ["demo"]
