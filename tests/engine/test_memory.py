"""Memory that goes back to the system, and nothing with it."""

import mmap

import torch

from serve_app.engine.memory import page_out, return_freed_memory


def resident_kb(address):
    """Resident memory of the mapping that holds an address."""
    here = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                here = start <= address < end
            elif here and head == "Rss:":
                return int(line.split()[1])
    raise AssertionError(f"nothing is mapped at {address}")


def test_a_mapped_files_pages_go_and_come_back(tmp_path):
    path = tmp_path / "weights"
    torch.arange(1_000_000, dtype=torch.float32).numpy().tofile(path)
    weights = torch.from_file(str(path), shared=False, size=1_000_000)
    total = float(weights.double().sum())
    before = resident_kb(weights.data_ptr())
    page_out(weights)
    assert resident_kb(weights.data_ptr()) <= before
    assert float(weights.double().sum()) == total


def test_paging_out_keeps_what_is_nowhere_else():
    for size in (1, mmap.PAGESIZE // 4, 300_000):
        numbers = torch.randn(size)
        expected = numbers.clone()
        page_out(numbers)
        assert torch.equal(numbers, expected)


def test_returned_memory_leaves_the_weights():
    linear = torch.nn.Linear(4, 4)
    expected = linear.weight.detach().clone()
    address = linear.weight.data_ptr()
    return_freed_memory(linear)
    assert torch.equal(linear.weight, expected)
    assert linear.weight.data_ptr() != address
