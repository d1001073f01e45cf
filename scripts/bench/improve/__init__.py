"""Is what `koffline.improve` recommends better, and how often is it not?

python -m scripts.bench.improve spibb                # the published protocol, tabular
python -m scripts.bench.improve spibb-ours           # the same, ours
python -m scripts.bench.improve peers                # others on many logs
python -m scripts.bench.improve ours                 # ours on them
python -m scripts.bench.improve certificates         # their lower ends alone
python -m scripts.bench.improve summary              # docs/results/improve*.json
"""
