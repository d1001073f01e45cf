"""Mapping files: YAML that holds plain values and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from koffline.errors import DataError
from koffline.untrusted.limits import Refused
from koffline.untrusted.yaml_files import LARGEST_TEXT, DuplicateKeyError, parse_yaml


def read_mapping_file(path: Path) -> dict[Any, Any]:
    """The top-level mapping of a YAML file; plain values only. Raises DataError in one line."""
    try:
        with path.open("rb") as file:
            found = parse_yaml(file.read(LARGEST_TEXT + 4).decode("utf-8-sig"))
    except OSError as error:
        raise DataError(f"mapping file {path} cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"mapping file {path} is no UTF-8 text; write lines of 'key: value'") from None
    except DuplicateKeyError as error:
        raise DataError(f"mapping file {path} names '{error}' twice; keep one of them") from None
    except Refused as error:
        raise DataError(f"mapping file {path} is not read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise DataError(f"mapping file {path} is not valid YAML{line}; write lines of 'key: value'") from None
    if not isinstance(found, dict):
        raise DataError(f"mapping file {path} holds no keys; write lines such as 'reward: r'")
    return found
