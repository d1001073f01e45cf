"""The same numbers on a GPU, where there is one."""

import pytest
import torch

from koffline.fitting import FitSettings, fit
from koffline.kernel_loss import blockwise_v_statistic
from koffline.kernels import Gaussian
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blockwise_statistics_agree(dtype):
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2000, 5, generator=generator), torch.randn(3, 2000, generator=generator)
    x, residual = x.to(dtype), residual.to(dtype)
    here = blockwise_v_statistic(x, residual, Gaussian(1.5), 300)
    there = blockwise_v_statistic(x.cuda(), residual.cuda(), Gaussian(1.5), 700)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=0.0)
