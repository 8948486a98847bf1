import pytest
import torch

# Small tensors on a machine where pytest-xdist already uses every core.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
