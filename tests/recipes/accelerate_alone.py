"""The training of the accelerate recipe in one process, by torch's attention and by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "recipes"))
import accelerate_loop as recipe

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    model = recipe.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = torch.utils.data.DataLoader(recipe.make_rows(), batch_size=4, shuffle=True, collate_fn=recipe.collate)
    batches = list(accelerator.prepare(loader))
    for pair in zip(batches[::2], batches[1::2], strict=True):
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in pair)
        loss = torch.zeros(())
        for batch in pair:
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            loss = loss + cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        print(f"loss {loss:.12f}")
    print(f"weights {torch.stack([p.norm() for p in model.parameters()]).norm():.12f}")
