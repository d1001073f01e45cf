"""Algorithms on d3rlpy's seam; with data/replay.py the only part that knows d3rlpy.

Importing this package registers koffline's algorithms with d3rlpy (it takes as long as importing d3rlpy, and
is silent), so that ``d3rlpy.load_learnable`` and ``from_json`` know them.
"""

from koffline.algos.kloss_cql import KLossCQL, KLossCQLConfig, KLossDiscreteCQL, KLossDiscreteCQLConfig
from koffline.algos.kloss_discrete_sac import KLossDiscreteSAC, KLossDiscreteSACConfig
from koffline.algos.kloss_dqn import KLossDQN, KLossDQNConfig
from koffline.algos.kloss_fqe import DiscreteKLossFQE, KLossFQE, KLossFQEConfig
from koffline.algos.kloss_iql import KLossIQL, KLossIQLConfig
from koffline.algos.kloss_sac import KLossSAC, KLossSACConfig
from koffline.algos.kloss_td3_plus_bc import KLossTD3PlusBC, KLossTD3PlusBCConfig
from koffline.algos.trust_pcl import DiscreteTrustPCL, DiscreteTrustPCLConfig, TrustPCL, TrustPCLConfig

__all__ = [
    "DiscreteKLossFQE",
    "DiscreteTrustPCL",
    "DiscreteTrustPCLConfig",
    "KLossCQL",
    "KLossCQLConfig",
    "KLossDQN",
    "KLossDQNConfig",
    "KLossDiscreteCQL",
    "KLossDiscreteCQLConfig",
    "KLossDiscreteSAC",
    "KLossDiscreteSACConfig",
    "KLossFQE",
    "KLossFQEConfig",
    "KLossIQL",
    "KLossIQLConfig",
    "KLossSAC",
    "KLossSACConfig",
    "KLossTD3PlusBC",
    "KLossTD3PlusBCConfig",
    "TrustPCL",
    "TrustPCLConfig",
]
