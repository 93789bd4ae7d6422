"""The disk tier passes the contract, on every file system and codec."""

import os

import pytest

from kvtier.storage.disk import DiskTier
from kvtier.storage.testing import NAMESPACE, TierContract


@pytest.fixture(params=["disk", "tmpfs"])
def root(request, tmp_path):
    if request.param == "disk":
        yield str(tmp_path / "store")
        return
    import shutil
    import tempfile

    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs to write to")
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="kvtier-test-")
    yield folder + "/store"
    shutil.rmtree(folder)


class TestDiskContract(TierContract):
    @pytest.fixture(params=["raw", "lz4", "zstd"])
    def open_tier(self, request, root):
        return lambda namespace=NAMESPACE, rank=0: DiskTier(
            root, namespace, rank, 1 << 30, codec=request.param, poll_s=0.05
        )


class TestDiskContractWithoutDirectIO(TierContract):
    @pytest.fixture
    def open_tier(self, tmp_path):
        return lambda namespace=NAMESPACE, rank=0: DiskTier(
            str(tmp_path / "store"), namespace, rank, 1 << 30, direct="never", poll_s=0.05
        )
