"""Algorithms built on d3rlpy; with data/replay.py the only part that depends on d3rlpy.

Importing this package silently registers koffline's algorithms with d3rlpy, so that
``d3rlpy.load_learnable`` and ``from_json`` know them. It takes as long as importing
d3rlpy.
"""

from koffline.data import import_d3rlpy

import_d3rlpy()  # silently, before any module here imports it

from koffline.algos.actor_critic import (
    KLossAWAC,
    KLossAWACConfig,
    KLossBCQ,
    KLossBCQConfig,
    KLossCalQL,
    KLossCalQLConfig,
    KLossCQL,
    KLossCQLConfig,
    KLossIQL,
    KLossIQLConfig,
    KLossReBRAC,
    KLossReBRACConfig,
    KLossSAC,
    KLossSACConfig,
    KLossTD3PlusBC,
    KLossTD3PlusBCConfig,
)
from koffline.algos.discrete import (
    KLossDiscreteCQL,
    KLossDiscreteCQLConfig,
    KLossDiscreteSAC,
    KLossDiscreteSACConfig,
    KLossDQN,
    KLossDQNConfig,
)
from koffline.algos.policies import DiscreteKLossFQE, KLossFQE, KLossFQEConfig
from koffline.algos.trust_pcl import (
    DiscreteTrustPCL,
    DiscreteTrustPCLConfig,
    TrustPCL,
    TrustPCLConfig,
)
