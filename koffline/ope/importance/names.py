"""The estimators over episodes by name, and what sets some of them apart."""

WITHOUT_MODEL = ("is", "pdis", "wis", "wpdis")
WITH_MODEL = ("dr", "wdr", "magic")
NAMES = WITHOUT_MODEL + WITH_MODEL
WHOLE_WEIGHT = ("is", "wis")  # of whole episodes, not of each step
CERTIFIABLE = {"is": False, "pdis": True}  # whether weights are those of each step
