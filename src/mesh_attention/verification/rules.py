"""The rules a plan must keep. Each is a function from evidence to breaches, independent of the other rules.

form         every step uses things of the right kind and form and deals with the right ranks (forms.py)
coverage     every unmasked block is attended exactly once, an empty one never
presence     nothing is read before it is written or after it is freed; nothing is written or finished twice
matching     every send is met by one receive of the same thing, in the same order; groups make the same collectives
progress     no circle of waiting, even where a send waits for its receive
homecoming   every partial reaches its home and is merged there exactly once; every result is finished
purpose      nothing travels that is not used
tidiness     at the end a rank holds its inputs and its results and nothing else
memory       the bytes held never exceed what the program states
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from mesh_attention.plan import steps
from mesh_attention.plan.buffers import held_nbytes
from mesh_attention.plan.steps import AXIS_OF, OUTPUTS, Item, Kind, running, transfers
from mesh_attention.plan.text import format_item, format_step
from mesh_attention.verification.evidence import Breach, CollectiveId, Evidence, Sighting, Transfer, op_of
from mesh_attention.verification.forms import form
from mesh_attention.verification.rendezvous import Outcome, circles

Rule = Callable[[Evidence, Outcome], Iterator[Breach]]


def coverage(evidence: Evidence, outcome: Outcome) -> Iterator[Breach]:
    matrix, assignment = evidence.matrix, evidence.plan.assignment
    seen: dict[tuple[int, int, int], tuple[int, int]] = {}
    shards = range(assignment.places)
    for rank, index, attend in _attends(evidence):
        for row in attend.rows:
            for col in attend.cols:
                block = (row.shard, col.shard, assignment.head_slice(rank))
                name = f"block (q{row.shard}, kv{col.shard})"
                if row.shard not in shards or col.shard not in shards or not matrix.is_live(row.shard, col.shard):
                    yield Breach("coverage", rank, index, f"{name} is attended, but the mask leaves nothing of it")
                elif block in seen:
                    first_rank, first_index = seen[block]
                    where = f"rank {first_rank} step {first_index}"
                    yield Breach("coverage", rank, index, f"{name} is attended again; {where} attended it already")
                seen.setdefault(block, (rank, index))
    for row_shard in shards:
        for col_shard in shards:
            if matrix.is_live(row_shard, col_shard):
                place = assignment.owner(row_shard, col_shard)
                for heads in range(assignment.ulysses):
                    if (row_shard, col_shard, heads) not in seen:
                        name = f"block (q{row_shard}, kv{col_shard})"
                        rank = assignment.rank(place, head_slice=heads)
                        yield Breach("coverage", rank, None, f"{name} is in this rank's tile, but no rank attends it")


def presence(evidence: Evidence, outcome: Outcome) -> Iterator[Breach]:
    for program in evidence.programs:
        held = evidence.inputs(program.rank)
        freed: set[Item] = set()
        finished: set[Item] = set()
        for index, done in enumerate(evidence.effects[program.rank]):
            for item in (*done.reads, *done.frees):
                if item not in held:
                    why = "has been freed" if item in freed else "was never written"
                    yield Breach("presence", program.rank, index, f"{format_item(item)} {why}")
            for item in done.writes:
                if item in held:
                    yield Breach("presence", program.rank, index, f"{format_item(item)} is overwritten")
            for item in done.adds:
                if item in finished:
                    yield Breach("presence", program.rank, index, f"{format_item(item)} was finished before")
            finished.update(item for item in done.frees if item.form == "running")
            held.update(done.writes, done.adds)
            held.difference_update(done.frees)
            freed.update(done.frees)


def matching(evidence: Evidence, outcome: Outcome) -> Iterator[Breach]:
    yield from _unmatched(evidence.send_sightings(), evidence.recvs, lambda t: f"rank {t.dest} has no receive for it")
    yield from _unmatched(evidence.recv_sightings(), evidence.sends, lambda t: f"rank {t.source} never sends it")
    yield from _out_of_order(evidence)
    yield from _uneven_calls(evidence)


def _unmatched(
    sightings: Iterator[Sighting], others: Counter[Transfer], complaint: Callable[[Transfer], str]
) -> Iterator[Breach]:
    met: Counter[Transfer] = Counter()
    for transfer, rank, index in sightings:
        met[transfer] += 1
        if met[transfer] > others[transfer]:
            yield Breach("matching", rank, index, f"{format_item(transfer.item)}: {complaint(transfer)}")


def _out_of_order(evidence: Evidence) -> Iterator[Breach]:
    """Between two ranks, transfers must be received in the order they are sent: not every transport has tags."""
    sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    received: dict[tuple[int, int], list[Sighting]] = defaultdict(list)
    for sighting in evidence.send_sightings():
        if sighting.transfer in evidence.recvs:
            sent[sighting.transfer.source, sighting.transfer.dest].append(sighting.transfer)
    for sighting in evidence.recv_sightings():
        if sighting.transfer in evidence.sends:
            received[sighting.transfer.source, sighting.transfer.dest].append(sighting)
    for pair, sightings in received.items():
        for expected, (transfer, rank, index) in zip(sent[pair], sightings, strict=False):
            if transfer != expected:
                message = (
                    f"rank {transfer.source} sends {format_item(expected.item)} before {format_item(transfer.item)}"
                )
                yield Breach("matching", rank, index, message)
                break


def _uneven_calls(evidence: Evidence) -> Iterator[Breach]:
    made: dict[CollectiveId, dict[int, int]] = defaultdict(dict)
    for rank, calls in enumerate(evidence.calls):
        for index, call in calls.items():
            made[call][rank] = index
    for call, index_by_rank in made.items():
        rank, index = next(iter(index_by_rank.items()))
        absent = set(call.group) - set(index_by_rank)
        if absent:
            message = f"rank(s) {', '.join(map(str, sorted(absent)))} of the group do not take part"
            yield Breach("matching", rank, index, message)
        ops = {op_of(evidence.programs[member].steps[at]) for member, at in index_by_rank.items()}
        if len(ops) > 1:
            yield Breach(
                "matching", rank, index, f"the group's ranks make different collectives: {', '.join(sorted(ops))}"
            )


def progress(evidence: Evidence, outcome: Outcome) -> Iterator[Breach]:
    for circle in circles(outcome.stuck):
        ranks = " -> ".join(str(wait.rank) for wait in (*circle, circle[0]))
        for wait in circle:
            step = format_step(evidence.programs[wait.rank].steps[wait.step])
            message = f"'{step}' waits for rank {wait.waits_for}, in a circle: {ranks}"
            yield Breach("progress", wait.rank, wait.step, message)


Origin = tuple[int, int]
"""The rank and step that computed a contribution."""


def homecoming(evidence: Evidence, outcome: Outcome) -> Iterator[Breach]:
    owed, arrived = _follow_partials(evidence, outcome)
    for program in evidence.programs:
        rank = program.rank
        place, heads = evidence.plan.assignment.place(rank), evidence.plan.assignment.head_slice(rank)
        for kind in OUTPUTS[evidence.plan.direction]:
            result = Item(kind, rank, "home")  # under Ulysses, this rank's heads of it
            if not evidence.matrix.segments(AXIS_OF[kind], place):
                continue
            at = _last_write(evidence, rank, result)
            if (rank, result) not in arrived:
                yield Breach("homecoming", rank, at, f"{format_item(result)} is never returned to the caller")
                continue
            merged = Counter(arrived[rank, result])
            due = Counter(owed[kind, place, heads])
            for origin in sorted(due.keys() | merged.keys()):
                if merged[origin] != due[origin]:
                    what = f"what rank {origin[0]} computed at step {origin[1]}"
                    times = f"is {merged[origin]} times in {format_item(result)}; expected {due[origin]}"
                    yield Breach("homecoming", rank, at, f"{what} {times}")


def _follow_partials(
    evidence: Evidence, outcome: Outcome
) -> tuple[dict[tuple[Kind, int, int], list[Origin]], dict[tuple[int, Item], list[Origin]]]:
    """The contributions computed for each result, and those that each held item contains after everything has run."""
    owed: dict[tuple[Kind, int, int], list[Origin]] = defaultdict(list)
    contents: dict[tuple[int, Item], list[Origin]] = {}
    moved: set[CollectiveId] = set()
    for rank, index in outcome.order:
        step = evidence.programs[rank].steps[index]
        match step:
            case steps.Attend():
                for total in evidence.effects[rank][index].adds:
                    owed[total.kind, total.shard, evidence.plan.assignment.head_slice(rank)].append((rank, index))
                    contents.setdefault((rank, total), []).append((rank, index))
            case steps.Finish(item):
                contents[rank, item] = contents.pop((rank, running(item.kind, item.shard)), [])
            case steps.Send(item, dest):
                contents[dest, item._replace(source=rank)] = list(contents.get((rank, item), ()))
            case steps.Collective():
                if evidence.calls[rank][index] not in moved:
                    # The first member to go on: all have reached this step, and none is past it.
                    moved.add(evidence.calls[rank][index])
                    _move_partials(evidence, evidence.calls[rank][index], contents)
            case steps.Merge(partial):
                total = running(partial.kind, partial.shard)
                contents.setdefault((rank, total), []).extend(contents.get((rank, partial), ()))
            case steps.Exchange(before, after):
                contents[rank, after] = contents.get((rank, before), [])
            case steps.Free(item):
                contents.pop((rank, item), None)
            case _:
                pass
    return owed, contents


def _move_partials(evidence: Evidence, call: CollectiveId, contents: dict[tuple[int, Item], list[Origin]]) -> None:
    """Give a collective's receivers what its senders hold at that point."""
    for rank in call.group:
        for index, made in evidence.calls[rank].items() if rank < len(evidence.calls) else ():
            if made == call:
                for recv in transfers(evidence.programs[rank].steps[index])[1]:
                    sent = contents.get((recv.source, recv.item._replace(source=None)), ())
                    contents[rank, recv.item] = list(sent)


def purpose(evidence: Evidence, outcome: Outcome) -> Iterator[Breach]:
    for program in evidence.programs:
        unused: dict[Item, int] = {}
        for index, step in enumerate(program.steps):
            done = evidence.effects[program.rank][index]
            for item in done.reads:
                unused.pop(item, None)
            if isinstance(step, steps.Recv | steps.Collective | steps.Exchange):
                unused |= dict.fromkeys(done.writes, index)
        for item, index in unused.items():
            if item not in evidence.outputs(program.rank):
                yield Breach("purpose", program.rank, index, f"{format_item(item)} is received and never used")


def tidiness(evidence: Evidence, outcome: Outcome) -> Iterator[Breach]:
    for program in evidence.programs:
        made = dict.fromkeys(evidence.inputs(program.rank), 0)
        for index, done in enumerate(evidence.effects[program.rank]):
            made |= dict.fromkeys((*done.writes, *done.adds), index)
            for item in done.frees:
                made.pop(item, None)
        for item in evidence.kept(program.rank) if evidence.plan.direction == "forward" else ():
            if item not in made:
                yield Breach("tidiness", program.rank, None, f"{format_item(item)} is to be kept, but is not held")
        for item, index in made.items():
            if item.form != "home" and item not in evidence.outputs(program.rank):
                yield Breach("tidiness", program.rank, index, f"{format_item(item)} is never freed")


def memory(evidence: Evidence, outcome: Outcome) -> Iterator[Breach]:
    for program in evidence.programs:
        profile = held_nbytes(
            program.steps,
            evidence.matrix,
            done=evidence.effects[program.rank],
            kept=evidence.matrix.kept(evidence.plan.schedule.keep, program.rank),
            has_kept=evidence.plan.direction == "backward",
        )
        for index, nbytes in enumerate(profile):
            if nbytes > program.peak_nbytes:
                message = f"{nbytes:,} bytes are held here, but the program states {program.peak_nbytes:,}"
                yield Breach("memory", program.rank, index, message)
                break


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (form, coverage, presence, matching, progress, homecoming, purpose, tidiness, memory)
}


def _attends(evidence: Evidence) -> Iterator[tuple[int, int, steps.Attend]]:
    for program in evidence.programs:
        for index, step in enumerate(program.steps):
            if isinstance(step, steps.Attend):
                yield program.rank, index, step


def _last_write(evidence: Evidence, rank: int, item: Item) -> int | None:
    written = [index for index, done in enumerate(evidence.effects[rank]) if item in done.writes]
    return written[-1] if written else None
