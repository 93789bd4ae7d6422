"""What `kvtier bench tiers` prints."""

from __future__ import annotations

from kvtier.tools.bench_tiers import show

ROW = {
    "record_mib": 4,
    "bytes": 2_000_000_000,
    "ram_load_ratio_to_memcpy": 0.91,
    "ram_save_ratio_to_memcpy": 0.82,
    "disk_load_ratio_to_odirect": 0.73,
    "disk_save_ratio_to_odirect": 0.64,
    "disk_verified_ratio_to_unverified": 0.95,
    "memcpy_s": 0.2,
    "plain_read_s": 1.0,
    "plain_write_s": 2.0,
}


def test_a_row_a_size_that_fits_a_terminal(capsys):
    """Ratios, and the plain speeds they are ratios to; no field's name as --json has it."""
    show([ROW, {**ROW, "record_mib": 32}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split("  ")[0].strip() == "4 MiB"
    assert lines[1].split()[2:7] == ["0.91", "0.82", "0.73", "0.64", "0.95"]
    assert "10.00 GB/s" in lines[1]
    assert lines[1].endswith("2.00 GB/s  1.00 GB/s")
    assert lines[2].startswith("32 MiB")
    assert all(len(line) <= 100 and "_" not in line for line in lines)
