"""How much memory may be asked for."""

import pytest

from kvtier.storage.errors import ConfigError
from kvtier.storage.memory_limit import check_memory, memory_limit_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A made-up machine of 64 GiB; returns what writes its files and its two mount points."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", f"MemFree: 1 kB\nMemTotal:       {64 * GIB // 1024} kB\n")
    return write, (str(tmp_path / "proc"), str(tmp_path / "cg"))


def test_without_cgroups(machine):
    """The machine's memory is the limit where there is no other."""
    assert memory_limit_bytes(*machine[1]) == 64 * GIB


@pytest.mark.parametrize("level", ["", "a/", "a/b/"])
def test_version_2(machine, level):
    """The smallest limit up the tree counts, and `max` is none."""
    write, mounts = machine
    write("proc/self/cgroup", "0::/a/b\n")
    for each in ("", "a/", "a/b/"):
        write(f"cg/{each}memory.max", f"{2 * GIB}\n" if each == level else "max\n")
    assert memory_limit_bytes(*mounts) == 2 * GIB


@pytest.mark.parametrize("level", ["", "docker/", "docker/x/"])
def test_version_1(machine, level):
    """Version 1 has its own tree; other controllers do not matter."""
    write, mounts = machine
    write("proc/self/cgroup", "5:cpu:/zz\n4:hugetlb,memory:/docker/x\n0::/none\n")
    for each in ("", "docker/", "docker/x/"):
        limit = 3 * GIB if each == level else 9223372036854771712
        write(f"cg/memory/{each}memory.limit_in_bytes", f"{limit}\n")
    assert memory_limit_bytes(*mounts) == 3 * GIB


def test_seen_from_inside_a_container(machine):
    """A path from outside that is not there leaves the limit at the visible top."""
    write, mounts = machine
    write("proc/self/cgroup", "0::/../../kubepods/pod1\n")
    write("cg/memory.max", f"{GIB}\n")
    assert memory_limit_bytes(*mounts) == GIB


def test_rubbish(machine):
    """Files that make no sense do not count."""
    write, mounts = machine
    write("proc/self/cgroup", "nonsense\n0::\n::::\n")
    write("cg/memory.max", "-5 what\n")
    assert memory_limit_bytes(*mounts) == 64 * GIB


def test_address_space_limit():
    """RLIMIT_AS counts too."""
    import subprocess
    import sys

    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (5 << 30, 5 << 30));"
        "from kvtier.storage.memory_limit import memory_limit_bytes; print(memory_limit_bytes())"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(out.stdout) <= 5 << 30


def test_refusal():
    """The refusal names the knob, the amount asked and the limit, in one line."""
    check_memory(GIB, "ram", 2 * GIB)
    with pytest.raises(ConfigError) as caught:
        check_memory(8 * GIB, "ram", 2 * GIB)
    text = str(caught.value)
    assert "ram: asks for 8.00 GiB" in text
    assert "2.00 GiB" in text
    assert "\n" not in text
