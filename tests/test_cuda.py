"""The same numbers on a GPU, where there is one."""

import pytest
import torch

from koffline.fitting import FitSettings, fit
from koffline.replicas import StackedMLP
from tests.engine_problems import FORMS, OBJECTIVES, PLANS, SIZES, make_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_fits_agree(name, form):
    records = []
    for device in ("cpu", "cuda"):
        network = StackedMLP.initialise(SIZES[form], range(4), dtype=torch.float64, device=device)
        settings = FitSettings(steps=30, batch_size=9, record_every=10)
        table = make_table(form).to(device)
        records.append(fit(table, network, OBJECTIVES[name], PLANS["shared"], settings))
    here, there = records
    torch.testing.assert_close(there.network.flat.cpu(), here.network.flat, rtol=0.0, atol=1e-9)
    torch.testing.assert_close(there.losses, here.losses, rtol=1e-9, atol=1e-12)
