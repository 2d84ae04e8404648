"""TRL's SFTTrainer on packed documents, with each packed sequence spread over ranks.

Run as: torchrun --nproc-per-node 4 examples/recipes/trl_packed.py --cp 2
"""

import argparse
import time

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from mesh_attention import MeshAttention
from mesh_attention.integrations.transformers import register
from mesh_attention.integrations.transformers.trainer import MeshTrainerMixin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = "once upon a time there was one small rank that held all of the tokens and it was slow".split()
PACKING = {"packing": True, "max_length": 101}  # best fit, documents whole; eval_packing follows
TRAINING = {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_steps": 4, "logging_steps": 1}
OUTPUT = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}


class MeshSFTTrainer(MeshTrainerMixin, SFTTrainer):
    """SFTTrainer for a model with mesh attention."""


def make_tokenizer():  # yours: AutoTokenizer.from_pretrained(name)
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def make_texts(count, seed):  # yours: load_dataset(name)
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 60, (count,), generator=draw).tolist()
    drawn = [torch.randint(len(WORDS), (length,), generator=draw).tolist() for length in lengths]
    return Dataset.from_dict({"text": [" ".join(WORDS[word] for word in words) for words in drawn]})


def make_model(attention):  # yours: AutoModelForCausalLM.from_pretrained(name, attn_implementation=attention)
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def train(trainer_class, attention, groups):  # a batch of 2 packed rows, however many groups it is divided among
    sizes = {f"per_device_{part}_batch_size": 2 // groups for part in ("train", "eval")}
    settings = SFTConfig("/tmp/trl", **PACKING, **TRAINING, **OUTPUT, **sizes, bf16=False, use_cpu=DEVICE == "cpu")
    texts = {"train_dataset": make_texts(40, seed=1), "eval_dataset": make_texts(12, seed=2)}
    trainer = trainer_class(make_model(attention), settings, processing_class=make_tokenizer(), **texts)
    trainer.train()
    if trainer.args.process_index == 0:
        names = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_entropy")
        for entry in trainer.state.log_history[:-1]:
            print(*(f"{name} {entry[name]:.12f}" for name in names if name in entry))
        print(f"weights {torch.stack([p.norm() for p in trainer.model.parameters()]).norm():.12f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, help="number of ranks that share a sequence; by default all of them")
    cp = parser.parse_args().cp
    torch.set_default_dtype(torch.float64)  # only to compare runs; leave it out

    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    cp = cp or dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
    register(MeshAttention(mesh["cp"]))
    train(MeshSFTTrainer, "mesh_attention", groups=mesh["dp"].size())
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads may still hold tensors; Python must not exit before they let go
