"""What a log's rows say about its own reading: tests of episode structure, alignment
and values.

Each test is a function of a log that yields symptoms, with exact counts or p-values,
and a remedy. The same tests run in ``koffline data inspect``, ``validate``, ``info``
and in every evaluation.
"""

from koffline.data.structure.suite import (
    Structure,
    is_small,
    symptoms_of,
    symptoms_of_log,
)
from koffline.data.structure.symptom import Symptom

__all__ = ["Structure", "Symptom", "is_small", "symptoms_of", "symptoms_of_log"]
