"""What host and device tell each other of a pass, in one kernel at its end."""

from __future__ import annotations

import torch

from mesh_attention.session.poison import Poison


def test_results_are_poisoned_once_a_rank_gave_up_also_in_a_graph() -> None:
    alarm, same = Poison(torch.device("cuda", 0)), torch.tensor([5, -5], device="cuda")
    results = [torch.ones(3000, device="cuda", dtype=torch.bfloat16), torch.ones(7, device="cuda")]
    alarm.check(same, results, counts=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alarm.check(same, results, counts=True)
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool(result.isfinite().all()) for result in results)
    assert alarm.passes_over() == 2
    alarm.give_up()
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool(result.isnan().all()) for result in results)
    assert alarm.passes_over() == 3
    assert alarm.verdict() is None


def test_a_launch_that_waits_for_the_device_does_not_hold_up_giving_up() -> None:
    alarm = Poison(torch.device("cuda", 0))
    torch.cuda._sleep(2_000_000_000)
    alarm.give_up()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
