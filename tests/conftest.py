import pytest
import torch

# Small tensors on a machine where pytest-xdist already uses every core.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)


@pytest.fixture
def two_threads(monkeypatch):
    """Two threads for the native kernel, however little there is to do."""
    monkeypatch.setattr("relpos.attend.kernel_inputs.WORK_FOR_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
