"""Temporary: correctness, then a sweep of tiles and splits."""
import os, sys, time, json, itertools
import torch
import sweep_swapped
from mesh_attention.kernels import launching
from mesh_attention.kernels.decode import Blocks, Reach, TorchDecode
from mesh_attention.kernels.decode_triton import Tile, TritonDecode
SWAPPED = False
plain = launching.kernel
def pick(file, name):
    return sweep_swapped.attend_split_b if SWAPPED and name == "attend_split" else plain(file, name)
launching.kernel = pick
D = torch.device("cuda", 0)
def say(*a): print(*a, flush=True)
t00 = time.time()

def case(S, tokens, H=32, HK=8, dqk=128, dv=128, bt=64, Q=1, dtype=torch.bfloat16, order="thd", layers=1, lens=None, seed=0):
    g = torch.Generator(D).manual_seed(seed)
    per = -(-tokens // bt); lens = lens or [tokens] * S
    need = [-(-n // bt) for n in lens]; nb = sum(need) + 3
    perm = torch.randperm(nb, device=D, generator=g).int()
    most = max(need)
    table = torch.zeros(S, most, dtype=torch.int32, device=D); at = 0
    for s, n in enumerate(need):
        table[s, :n] = perm[at:at + n]; at += n
    def store(d):
        if order == "thd":
            return torch.randn(nb, bt, HK, d, device=D, generator=g, dtype=dtype)
        return torch.randn(nb, HK, bt, d, device=D, generator=g, dtype=dtype).transpose(1, 2)
    blocks = [Blocks(store(dqk), store(dv)) for _ in range(layers)]
    stop = torch.tensor(lens, device=D, dtype=torch.int32)[:, None] - torch.arange(Q - 1, -1, -1, device=D, dtype=torch.int32)
    first = torch.zeros_like(stop)
    q = torch.randn(S, Q, H, dqk, device=D, generator=g, dtype=dtype)
    word = 4 // q.itemsize
    packed = torch.full((S, Q, H, dv + word), float("nan"), device=D, dtype=dtype)
    out = packed[..., :dv]
    lse = packed.view(torch.float32)[..., -1] if dv % word == 0 else torch.empty(S, Q, H, device=D)
    return q, blocks, Reach(table, first, stop.contiguous()), out, lse

def check():
    for n, (kw, tile, cap, swap) in enumerate([
        (dict(S=3, tokens=1000, Q=1), Tile(64, 4, 3, 2), 0., False),
        (dict(S=3, tokens=1000, Q=4, bt=16), Tile(64, 4, 3, 2), 0., False),
        (dict(S=2, tokens=700, Q=33, bt=128, dtype=torch.float16), Tile(64, 4, 3, 2), 5., False),
        (dict(S=2, tokens=700, Q=2, dqk=192, dv=128), Tile(64, 4, 2, 1), 0., False),
        (dict(S=2, tokens=700, Q=2, dqk=80, dv=60, bt=48, dtype=torch.float16), Tile(64, 4, 3, 1), 0., False),
        (dict(S=2, tokens=500, Q=2, dqk=256, dv=256, order="htd"), Tile(64, 4, 2, 1), 0., False),
        (dict(S=2, tokens=500, Q=2, dtype=torch.float32), Tile(32, 4, 2, 1), 0., False),
        (dict(S=3, tokens=1000, Q=4), Tile(64, 4, 3, 2), 0., True),
    ]):
        global SWAPPED
        SWAPPED = swap; launching._PREPARED.clear()
        q, (b,), r, out, lse = case(**kw, seed=n)
        r.first[0] += 37
        r.stop[1] = r.stop[1] // 3 * (torch.arange(r.stop.shape[1], device=D) % 2 == 0)
        due, due_lse = torch.empty(out.shape, dtype=torch.float64, device=D), torch.empty(lse.shape, dtype=torch.float64, device=D)
        TorchDecode().attend(q.double(), Blocks(b.k.double(), b.v.double()), r, scale=0.09, softcap=cap, out=due, lse=due_lse)
        t0 = time.time()
        try:
            k = TritonDecode(tile=tile, splits=5)
            for _ in range(2):
                k.attend(q, b, r, scale=0.09, softcap=cap, out=out, lse=lse)
            ok = torch.equal(lse == -torch.inf, due_lse == -torch.inf)
            fin = due_lse.isfinite()
            say("check", n, ok, "out %.1e" % (out.double() - due).abs().max(), "lse %.1e" % (lse.double() - due_lse)[fin].abs().max(), "%.1fs" % (time.time() - t0))
        except Exception as e:
            say("check", n, "FAIL", str(e)[:300])
    SWAPPED = False; launching._PREPARED.clear()
    parts = torch.randn(5, 70, 130, device=D, dtype=torch.bfloat16)[..., :128]; lses = torch.randn(5, 70, device=D) * 5; lses[:, 3] = -torch.inf
    a = torch.empty(70, 128, device=D, dtype=torch.bfloat16), torch.empty(70, device=D); b = tuple(map(torch.empty_like, a))
    TorchDecode().merge(parts, lses, *a); TritonDecode().merge(parts, lses, *b)
    fin = a[1].isfinite()
    say("merge", (a[0].float() - b[0].float()).abs().max().item(), (a[1] - b[1])[fin].abs().max().item(), b[1][3].item())

def timed(act, calls=8, reps=5):
    """Seconds of act(i), from replays of a graph of several."""
    for i in range(2): act(i)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(calls): act(i)
    ts = []
    for _ in range(reps + 1):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b) / 1e3 / calls)
    return sorted(ts[1:])[reps // 2]

def rates():
    x = torch.randn(2**30, device=D); y = torch.empty_like(x)
    s = timed(lambda i: torch.sum(x), 2); m = timed(lambda i: torch.amax(x), 2); c = timed(lambda i: y.copy_(x), 2)
    say("read sum %.2f amax %.2f copy %.2f TB/s" % (2**32 / s / 1e12, 2**32 / m / 1e12, 2**33 / c / 1e12))

SHAPES = {
    "a": (dict(S=8, tokens=16384, layers=2), (2, 4, 6, 8, 12)),
    "b": (dict(S=1, tokens=131072, layers=2), (16, 33, 49, 66, 99)),
    "c": (dict(S=1, tokens=16384, layers=6), (16, 33, 49)),
    "u": (dict(S=8, tokens=65536, lens=[65536, 16384, 16384, 8192, 8192, 8192, 4096, 4096], layers=2), (4, 8, 16, 33)),
}
ROWS = []
def sweep(tiles, shapes, title, **kw):
    """One line for each tile: for each shape TB/s at its best splits."""
    global SWAPPED
    made = {}
    for name in shapes:
        given, splits = SHAPES[name]
        made[name] = (case(**{**given, **kw}), splits)
    for swap, tile in tiles:
        SWAPPED = swap; launching._PREPARED.clear()
        cells = []
        for name, ((q, blocks, r, out, lse), splits) in made.items():
            nbytes = int((r.stop.amax(1) - r.first.amin(1)).sum()) * 8 * 256 * 2
            got = []
            for n in splits:
                k = TritonDecode(tile=tile, splits=n)
                try:
                    t = timed(lambda i: k.attend(q, blocks[i % len(blocks)], r, scale=0.09, softcap=0., out=out, lse=lse))
                    got.append((t, n))
                except Exception as e:
                    if not got: cells.append(str(e)[:40])
                    break
            ROWS.append([title, "B" if swap else "A", list(tile), name, [(n, round(t * 1e6, 1)) for t, n in got]])
            if got:
                cells.append(f"{name}: " + " ".join(f"{n}:{nbytes / t / 1e12:.2f}" for t, n in got))
        say(title, "B" if swap else "A", *tile[:3], "|", " | ".join(cells), "| %.0fs" % (time.time() - t00))
    json.dump(ROWS, open(os.environ.get("OUT", "/tmp") + "/rows.json", "w"))

if __name__ == "__main__":
    say(torch.cuda.get_device_name(), torch.__version__)
    rates(); check(); say("%.0fs" % (time.time() - t00))
    T = lambda *a: Tile(*a, 1)
    A = [T(64, 4, 3), T(64, 4, 2), T(64, 4, 4), T(64, 4, 5), T(64, 8, 3), T(64, 8, 4), T(32, 4, 4), T(32, 4, 6), T(32, 2, 4), T(128, 8, 3), T(128, 4, 2)]
    B = [T(64, 4, 2), T(64, 4, 3), T(64, 4, 4), T(128, 4, 2), T(128, 8, 3)]
    sweep([(False, t) for t in A] + [(True, t) for t in B], ("a", "b", "c", "u"), "bt64")
    few = [(False, T(64, 4, 3)), (False, T(64, 4, 4)), (True, T(64, 4, 2))]
    sweep(few, ("a", "b"), "bt64htd", order="htd")
    sweep([*few, (False, T(128, 8, 3))], ("a", "b"), "bt128", bt=128)
    sweep(few, ("a",), "bt16", bt=16)
    sweep(few[:1], ("a",), "bt256", bt=256)
    sweep(few, ("a", "b"), "bt64 Q4", Q=4)
    sweep(few[:1], ("a",), "bt128htd", order="htd", bt=128)
