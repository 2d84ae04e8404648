"""Temporary: correctness, then a sweep of tiles and splits."""
import os, sys, time, json, itertools
import torch
from mesh_attention.kernels import launching
from mesh_attention.kernels.decode import Blocks, Reach, TorchDecode
from mesh_attention.kernels.decode_triton import Tile, TritonDecode
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


from mesh_attention.kernels import decode_triton as DT
def one(title, tiles, rows=None, on_sm=6, **kw):
    q, blocks, r, out, lse = case(**kw)
    b = blocks[0]
    nbytes = int((r.stop.amax(1) - r.first.amin(1)).sum()) * b.k.shape[2] * (b.k.shape[3] + b.v.shape[3]) * b.k.itemsize
    cells = []
    for t in tiles:
        DT._work.cache_clear(); launching._PREPARED.clear()
        DT.MOST_ON_SM = on_sm
        old = dict(DT.MOST_ROWS)
        if rows: DT.MOST_ROWS[q.itemsize] = rows
        try:
            k = TritonDecode(tile=Tile(*t) if t else None)
            s = timed(lambda i: k.attend(q, blocks[i % len(blocks)], r, scale=0.09, softcap=0., out=out, lse=lse))
            w = DT._work(q.shape, b.v.shape, q.dtype, q.device, k._tile)
            sc = next(iter(k._scratches.values()))[:w.scratch_size][-2 * w.sequences:].view(-1, 2)[:, 1].int().tolist()
            cells.append(f"{t}: {s * 1e6:.1f}us {nbytes / s / 1e12:.2f} n={sum(sc)}/{w.splits}" + (f" max {max(sc)}" if len(set(sc)) > 1 else ""))
        except Exception as e:
            cells.append(f"{t}: {type(e).__name__} {str(e)[:60]}")
        DT.MOST_ROWS.update(old)
    say(title, "|", " | ".join(cells), "| %.0fs" % (time.time() - t00))

if __name__ == "__main__":
    say(torch.cuda.get_device_name(), torch.__version__)
    rates()
    std = [(64, 4, 3, 3), (64, 4, 3, 2), (64, 4, 3, 1), (64, 4, 4, 2), (32, 2, 4, 3), (32, 4, 4, 3)]
    one("a", std, S=8, tokens=16384, layers=2)
    one("b", std, S=1, tokens=131072, layers=2)
    one("c", std, S=1, tokens=16384, layers=6)
    one("a on_sm 3", std[:1], on_sm=3, S=8, tokens=16384, layers=2)
    one("c on_sm 3", std[:1], on_sm=3, S=1, tokens=16384, layers=6)
    one("u", std, S=8, tokens=65536, lens=[65536, 16384, 16384, 8192, 8192, 8192, 4096, 4096], layers=2)
    one("20x8192", std[:3], S=20, tokens=8192, layers=2)
    one("34x4096", std[:3], S=34, tokens=4096, layers=2)
    one("64x2048", std[:3], S=64, tokens=2048, layers=2)
    one("256x1024", std[:3], S=256, tokens=1024, layers=2)
    wide = [(64, 4, 3, 3), (64, 4, 2, 2), (32, 4, 3, 2), (64, 8, 2, 2), (64, 8, 3, 1)]
    one("Q16 rows64", wide, S=8, tokens=16384, Q=16)
    one("Q16 rows32", wide[:3], rows=32, S=8, tokens=16384, Q=16)
    one("Q16 rows16", wide[:1], rows=16, S=8, tokens=16384, Q=16)
    one("Q8 (rows 32)", wide[:3], S=8, tokens=16384, Q=8)
    one("d64", [(128, 4, 3, 3), (64, 4, 3, 3), (64, 4, 5, 3)], S=8, tokens=16384, dqk=64, dv=64)
    one("d64 bt128", [(128, 4, 3, 3), (64, 4, 3, 3)], S=8, tokens=16384, dqk=64, dv=64, bt=128)
    one("d192/128", [(32, 4, 3, 3), (64, 4, 2, 2), (32, 4, 4, 2), (64, 8, 3, 2)], S=8, tokens=16384, dqk=192)
    one("d256", [(32, 4, 3, 2), (64, 4, 2, 2), (32, 8, 3, 2), (32, 4, 4, 2)], S=8, tokens=16384, dqk=256, dv=256)
    one("f32", [(32, 4, 3, 2), (16, 4, 3, 2), (32, 8, 3, 2)], S=8, tokens=8192, dtype=torch.float32)
    plain_launch = DT.launch
    DT.launch = lambda key, *rest: plain_launch(key, *rest) if key[0] != "merge_splits" else None
    one("c without merge", std[:2], S=1, tokens=16384, layers=6)
    one("a without merge", std[:2], S=8, tokens=16384, layers=2)
    one("c, 64 tokens", std[:1], S=1, tokens=64, layers=2)
    DT.launch = plain_launch
    one("c, 64 tokens, merged", std[:1], S=1, tokens=64, layers=2)
