"""TRL's SFTTrainer on packed documents, with each packed sequence spread over ranks.

Run as: torchrun --nproc-per-node 4 examples/recipes/trl_packed.py --cp 2
"""

import sys
import time

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from mesh_attention import MeshAttention
from mesh_attention.transformers import parallelize
from mesh_attention.transformers.trainer import MeshTrainerMixin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = [f"word{number}" for number in range(30)]
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


def make_model():  # yours: AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config)


def make_trainer(kind, model, groups, **others):  # a batch of 2 packed rows, divided among the groups
    sizes = {f"per_device_{part}_batch_size": 2 // groups for part in ("train", "eval")}
    given = {**PACKING, **TRAINING, **OUTPUT, **sizes, **others}
    settings = SFTConfig("/tmp/mesh-attention-trl", **given, bf16=False, use_cpu=DEVICE == "cpu")
    texts = {"train_dataset": make_texts(40, seed=1), "eval_dataset": make_texts(12, seed=2)}
    return kind(model, settings, processing_class=make_tokenizer(), **texts)


def read_log(trainer):
    names = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_mean_token_accuracy")
    log = {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in names}
    return {**log, "weights": [float(torch.stack([p.norm() for p in trainer.model.parameters()]).norm())]}


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # only to compare runs; leave it out

    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    cp = int(sys.argv[2]) if sys.argv[1:2] == ["--cp"] else dist.get_world_size()  # ranks that share a sequence
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
    model = parallelize(make_model(), MeshAttention(mesh["cp"]))
    trainer = make_trainer(MeshSFTTrainer, model, groups=mesh["dp"].size())
    trainer.train()
    for name, values in read_log(trainer).items():
        trainer.accelerator.print(*(f"{name} {value:.12f}" for value in values), flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads may still hold tensors; Python must not exit before they let go
