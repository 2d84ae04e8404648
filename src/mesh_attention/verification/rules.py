"""The rules a plan must keep, each a function from evidence to breaches; and `check` and `verify`, which ask them all.

form         every step uses things that exist, of the right kind, form and label, with the right ranks (well_formed.py)
coverage     every unmasked block is attended exactly once, an empty one never
presence     nothing is read before it is written or after it is freed; nothing is written, cleared or finished twice
matching     every send is met by one receive of the same thing, in the same order; groups make the same collectives
progress     all transfers get through, even where each rank's posts run one after the other
homecoming   every partial reaches its home and is merged there exactly once; every result is finished
purpose      nothing travels that is not used
tidiness     at the end a rank holds its inputs and its results and nothing else; what is kept has its own buffer
memory       the bytes held never exceed what the program states

Together they prove that a plan computes attention, by induction over the steps: an item that is held has the contents
that its name promises. `docs/decisions/0022-what-is-proved.md` has the argument, and what each rule takes for granted.
The rules that follow `form` rely on it and are not asked if it is broken; otherwise they do not depend on each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from mesh_attention.errors import PlanError
from mesh_attention.plan import steps
from mesh_attention.plan.buffer_sizes import held_nbytes, shared_buffers
from mesh_attention.plan.format import format_item, format_step
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.steps import AXIS_OF, OUTPUTS, Item, Kind, Step, in_flight, running, staged, transfers
from mesh_attention.units import Progress, count
from mesh_attention.verification.evidence import Breach, CollectiveId, End, Evidence, Transfer, circles, stuck_ranks
from mesh_attention.verification.well_formed import form, missing

Rule = Callable[[Evidence], Iterator[Breach]]


def coverage(evidence: Evidence) -> Iterator[Breach]:
    matrix, assignment = evidence.matrix, evidence.plan.assignment
    seen: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    shards, parts = range(assignment.places), assignment.parts("row")
    for rank, index, rows, cols in _attends(evidence):
        for row in rows:
            for col in cols:
                block = (row.shard, col.shard, row.part, assignment.head_slice(rank))
                name = _block_name(*block[:3])
                if not matrix.is_live(row.shard, col.shard, row.part):
                    yield Breach("coverage", rank, index, f"{name} is attended, but the mask leaves nothing of it")
                elif block in seen:
                    first_rank, first_index = seen[block]
                    where = f"rank {first_rank} step {first_index}"
                    yield Breach("coverage", rank, index, f"{name} is attended again; {where} attended it already")
                seen.setdefault(block, (rank, index))
    for row_shard in shards:
        for col_shard in shards:
            for part in parts:
                if not matrix.is_live(row_shard, col_shard, part):
                    continue
                place = assignment.owner(row_shard, col_shard)
                for heads in range(assignment.ulysses_degree):
                    if (row_shard, col_shard, part, heads) not in seen:
                        name = _block_name(row_shard, col_shard, part)
                        rank = assignment.rank(place, head_slice=heads)
                        yield Breach("coverage", rank, None, f"{name} is in this rank's tile, but no rank attends it")


def _block_name(row: int, col: int, part: int) -> str:
    return f"block ({format_item(Item('q', row, part=part))}, kv{col})"


def presence(evidence: Evidence) -> Iterator[Breach]:
    for program in evidence.programs:
        held = evidence.inputs(program.rank)
        freed: set[Item] = set()
        finished: set[Item] = set()
        for index, done in enumerate(evidence.effects[program.rank]):
            for item in (*done.reads, *done.frees):
                if item not in held:
                    why = "has been freed" if item in freed else "was never written"
                    yield Breach("presence", program.rank, index, f"{format_item(item)} {why}")
            cleared = done.adds if isinstance(program.steps[index], steps.Clear) else ()
            for item, times in Counter((*done.writes, *cleared)).items():
                if item in held or times > 1:
                    yield Breach("presence", program.rank, index, f"{format_item(item)} is overwritten")
            for item in done.adds:
                if item in finished:
                    yield Breach("presence", program.rank, index, f"{format_item(item)} was finished before")
            finished.update(item for item in done.frees if item.form == "running")
            held.update(done.writes, done.adds)
            held.difference_update(done.frees)
            freed.update(done.frees)


def matching(evidence: Evidence) -> Iterator[Breach]:
    yield from _unmatched(evidence.sends, evidence.recvs, lambda t: f"rank {t.dest} has no receive for it")
    yield from _unmatched(evidence.recvs, evidence.sends, lambda t: f"rank {t.source} never sends it")
    yield from _out_of_order(evidence)
    yield from _uneven_calls(evidence)


def _unmatched(
    ends: dict[Transfer, End], others: dict[Transfer, End], complaint: Callable[[Transfer], str]
) -> Iterator[Breach]:
    for transfer, end in ends.items():
        if transfer not in others:
            yield Breach("matching", end.rank, end.step, f"{format_item(transfer.item)}: {complaint(transfer)}")


def _out_of_order(evidence: Evidence) -> Iterator[Breach]:
    """Between two ranks, transfers must be received in the order they are sent: not every transport has tags."""
    sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    received: dict[tuple[int, int], list[End]] = defaultdict(list)
    for transfer in evidence.sends:
        if transfer in evidence.recvs:
            sent[transfer.source, transfer.dest].append(transfer)
    for transfer, end in evidence.recvs.items():
        if transfer in evidence.sends:
            received[transfer.source, transfer.dest].append(end)
    for pair, ends in received.items():
        for expected, (transfer, rank, index, _) in zip(sent[pair], ends, strict=True):
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
        ops = {_op_of(evidence.programs[member].steps[at]) for member, at in index_by_rank.items()}
        if len(ops) > 1:
            yield Breach(
                "matching", rank, index, f"the group's ranks make different collectives: {', '.join(sorted(ops))}"
            )


def _op_of(step: Step) -> str:
    """The operation of a collective, which all members of its group must agree on."""
    match step:
        case steps.Collective(op, _, _, _):
            return op
        case steps.Exchange(before, _, _, _, _):
            return f"exchange {before.kind}"
        case _:
            return ""


def progress(evidence: Evidence) -> Iterator[Breach]:
    for circle in circles(stuck_ranks(evidence)):
        ranks = " -> ".join(str(wait.rank) for wait in (*circle, circle[0]))
        for wait in circle:
            step = format_step(evidence.programs[wait.rank].steps[wait.step])
            message = f"'{step}' waits for rank {wait.waits_for}, in a circle: {ranks}"
            yield Breach("progress", wait.rank, wait.step, message)


Origin = tuple[int, int]
"""The rank and step that computed a contribution."""
Part = Origin | Transfer
"""A contribution, or all those that arrived in a transfer."""


def homecoming(evidence: Evidence) -> Iterator[Breach]:
    partials = _Partials(evidence)
    for program in evidence.programs:
        rank = program.rank
        heads = evidence.plan.assignment.head_slice(rank)
        for result in sorted(evidence.outputs(rank) - evidence.kept(rank)):  # under Ulysses, this rank's heads of it
            kind, place = result.kind, evidence.plan.assignment.place(result.shard)
            if not evidence.matrix.has_shard(AXIS_OF[kind], place):
                continue
            written = [index for index, done in enumerate(evidence.effects[rank]) if result in done.writes]
            at = written[-1] if written else None
            if result not in partials.held[rank]:
                yield Breach("homecoming", rank, at, f"{format_item(result)} is never returned to the caller")
                continue
            merged = partials.computed(partials.held[rank][result])
            part = evidence.plan.assignment.part(AXIS_OF[kind], rank, result.part)
            expected = Counter(partials.owed[kind, place, part, heads])
            for origin in sorted(expected.keys() | merged.keys()):
                if merged[origin] != expected[origin]:
                    what = f"what rank {origin[0]} computed at step {origin[1]}"
                    times = f"is {merged[origin]} times in {format_item(result)}; expected {expected[origin]}"
                    yield Breach("homecoming", rank, at, f"{what} {times}")


class _Partials:
    """The contributions computed for each result, and the parts of every item that a rank holds at the end.

    Programs are followed one by one: what a transfer brings is looked up afterwards, so that no order of ranks matters.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.owed: dict[tuple[Kind, int, int, int], list[Origin]] = defaultdict(list)
        self.held: list[dict[Item, tuple[Part, ...]]] = []
        self._sent: dict[Transfer, tuple[Part, ...]] = {}
        self._arrived: dict[Transfer, Counter[Origin]] = {}
        for program in evidence.programs:
            self.held.append(self._follow(evidence, program.rank))

    def _follow(self, evidence: Evidence, rank: int) -> dict[Item, tuple[Part, ...]]:
        heads, results = evidence.plan.assignment.head_slice(rank), OUTPUTS[evidence.plan.direction]
        held: dict[Item, tuple[Part, ...]] = {}
        for index, step in enumerate(evidence.programs[rank].steps):
            match step:
                case steps.Attend():
                    for total in evidence.effects[rank][index].adds:
                        self.owed[total.kind, total.shard, total.part, heads].append((rank, index))
                        held[total] = (*held.get(total, ()), (rank, index))
                case steps.Decode(rows, _, own_partials):
                    for row, partial in zip(rows, own_partials, strict=True):
                        self.owed[partial.kind, row.shard, row.part, heads].append((rank, index))
                        held[partial] = ((rank, index),)
                case steps.Combine(partials, total):
                    held[total] = tuple(part for partial in partials for part in held.get(partial, ()))
                case steps.Pack(before, after) if before.kind in results:
                    held[after] = held.get(before, ())
                case steps.Merge(partial):
                    total = running(partial)
                    held[total] = held.get(total, ()) + held.get(partial, ())
                case steps.Finish(item):
                    held[item] = held.pop(running(item), ())
                case steps.Exchange(before, after) if after.kind in results:
                    held[after] = held.get(before, ())
                case steps.Unpack(before, after):  # this rank's own piece, and those of others: of the same sum
                    pieces = held.get(staged(after), ())
                    held[after] = pieces if held.get(before) == pieces else ()
                case steps.Free(item):
                    held.pop(item, None)
                case steps.Send() | steps.Recv() | steps.Collective():
                    for transfer, _, _, item in evidence.ends[rank].get(index, ()):
                        if item.kind not in results:
                            continue
                        if transfer.source == rank:
                            self._sent[transfer] = held.get(item, ())
                        else:
                            held[item] = (transfer,)
                case _:
                    pass
        return held

    def computed(self, parts: tuple[Part, ...]) -> Counter[Origin]:
        """How often each contribution is among the parts, counting what transfers brought."""
        times: Counter[Origin] = Counter()
        for part in parts:
            times.update(self._brought(part) if isinstance(part, Transfer) else (part,))
        return times

    def _brought(self, transfer: Transfer) -> Counter[Origin]:
        """The contributions in a transfer. In a circle of transfers, which the rule of progress reports, there are
        none."""
        waiting, entered = [transfer] if transfer not in self._arrived else [], set[Transfer]()
        while waiting:
            top = waiting[-1]
            parts = self._sent.get(top, ())
            entered.add(top)
            first = [p for p in parts if isinstance(p, Transfer) and p not in self._arrived and p not in entered]
            if first:
                waiting += first
                continue
            waiting.pop()
            known = tuple(part for part in parts if not isinstance(part, Transfer) or part in self._arrived)
            self._arrived[top] = self.computed(known)
        return self._arrived[transfer]


def purpose(evidence: Evidence) -> Iterator[Breach]:
    for program in evidence.programs:
        unused: dict[Item, int] = {}
        for index, step in enumerate(program.steps):
            done = evidence.effects[program.rank][index]
            for item in done.reads:
                unused.pop(item, None)
            if transfers(step)[1]:
                unused |= dict.fromkeys(in_flight(step)[0], index)
        for item, index in unused.items():
            if item.form != "home" and item not in evidence.outputs(program.rank):
                yield Breach("purpose", program.rank, index, f"{format_item(item)} is received and never used")


def tidiness(evidence: Evidence) -> Iterator[Breach]:
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
            if item.form not in ("home", "kept") and item not in evidence.outputs(program.rank):
                yield Breach("tidiness", program.rank, index, f"{format_item(item)} is never freed")
        yield from _mixed_with_kept(evidence, program)


def _mixed_with_kept(evidence: Evidence, program: Program) -> Iterator[Breach]:
    """The kept items of a kind have one buffer for themselves, so that both passes find them at the same places."""
    kept = [group for group in evidence.matrix.kept(evidence.plan.schedule.keep, program.rank) if group]
    if not kept:
        return
    own = {item for group in kept for item in group}
    for shared in shared_buffers(program.steps, kept):
        strangers = [item for item in shared if item not in own]
        if strangers and len(strangers) < len(shared):
            names = ", ".join(map(format_item, strangers))
            message = f"{names}: attended together with kept items, so it would share their buffer; attend it apart"
            yield Breach("tidiness", program.rank, None, message)


def memory(evidence: Evidence) -> Iterator[Breach]:
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


def _attends(evidence: Evidence) -> Iterator[tuple[int, int, tuple[Item, ...], tuple[Item, ...]]]:
    """Rank, index, rows and columns of every step that attends."""
    for program in evidence.programs:
        for index, step in enumerate(program.steps):
            match step:
                case steps.Attend(rows, cols):
                    yield program.rank, index, rows, cols
                case steps.Decode(rows, cache):
                    yield program.rank, index, rows, (cache,)
                case _:
                    pass


# Checking a plan


WHOLE_TABLE = 40
"""Programs up to this many steps are shown in full; longer ones around the marked rows only."""
SURROUNDINGS = 4
SHOWN_BREACHES = 20
SHOWN_RANKS = 3


class BrokenPlanError(PlanError):
    """A plan that breaks rules; `breaches` holds all breaches, the message shows the first ones with their step
    tables."""

    def __init__(self, plan: Plan, breaches: tuple[Breach, ...]) -> None:
        super().__init__(format_breaches(plan, breaches))
        self.breaches = breaches


def check(plan: Plan, *, on_progress: Progress | None = None) -> tuple[Breach, ...]:
    """Every breach of the rule of forms or, if there is none, of the other rules, which rely on it.

    `on_progress` gets the current task and the fraction done.
    """
    tell = on_progress or (lambda activity, fraction: None)
    ranks = plan.problem.ranks

    def programs() -> Iterator[Program]:
        for program in plan.all_programs():
            tell("building programs", 0.5 * program.rank / ranks)
            yield program

    built = list(programs())
    breaches = [breach for program in built for breach in missing(plan, program)]
    if breaches:
        return tuple(breaches)
    evidence = Evidence(plan, built)
    for number, (name, rule) in enumerate(RULES.items()):
        tell(f"checking {name}", 0.5 + 0.5 * number / len(RULES))
        breaches.extend(rule(evidence))
        if breaches and rule is form:
            break  # the other rules rely on it
    tell("checked", 1.0)
    return tuple(breaches)


def verify(plan: Plan) -> None:
    """Raise `BrokenPlanError` unless the plan keeps every rule."""
    breaches = check(plan)
    if breaches:
        raise BrokenPlanError(plan, breaches)


def format_breaches(plan: Plan, breaches: Sequence[Breach]) -> str:
    """The list of breaches, then the step table of the first ranks that have any."""
    rules = ", ".join(sorted({breach.rule for breach in breaches}))
    lines = [f"{plan!r} breaks the rules in {count(len(breaches), 'place')}: {rules}"]
    for breach in breaches[:SHOWN_BREACHES]:
        where = f"rank {breach.rank}" + (f" step {breach.step}" if breach.step is not None else "")
        lines.append(f"  {breach.rule}: {where}: {breach.message}")
    if len(breaches) > SHOWN_BREACHES:
        lines.append(f"  … and {len(breaches) - SHOWN_BREACHES} more")
    ranks = list(dict.fromkeys(b.rank for b in breaches if b.step is not None and b.rank < plan.problem.ranks))
    for rank in ranks[:SHOWN_RANKS]:
        marked = {b.step for b in breaches if b.rank == rank and b.step is not None}
        lines += ["", f"rank {rank}", *_step_table(plan.program(rank), marked)]
    return "\n".join(lines)


def _step_table(program: Program, marked: set[int]) -> Iterator[str]:
    total = len(program.steps)
    shown = [
        index
        for index in range(total)
        if total <= WHOLE_TABLE or any(abs(index - mark) <= SURROUNDINGS for mark in marked)
    ]
    previous = -1
    for index in shown:
        if index != previous + 1:
            yield "          …"
        mark = "-->" if index in marked else "   "
        yield f"  {mark} {index:4d}  {format_step(program.steps[index])}"
        previous = index
    if previous != total - 1:
        yield "          …"
