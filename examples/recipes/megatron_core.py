"""Train a small GPT of Megatron-core with its tokens spread over the context-parallel ranks by mesh attention.

torchrun --nproc-per-node 4 examples/recipes/megatron_core.py  # cp 4; tp=2 for cp 2 × tp 2; cp=2 for dp 2 × cp 2
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.nn.functional import pad

from mesh_attention.integrations.megatron import MeshCoreAttention

SEQ, VOCABULARY, ROWS = 101, 64, 4


class OnCpu(torch.overrides.TorchFunctionMode):  # CPU tensors where Megatron asks for CUDA; on GPUs, leave it out
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        kwargs |= {"device": "cpu"} if "cuda" in str(kwargs.get("device")) else {}
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


def forward_step(batches, model):
    batch = get_batch_on_this_cp_rank(next(batches))  # rank r gets chunks r and 2·cp - 1 - r
    losses = model(batch["tokens"], None, attention_mask=None, labels=batch["labels"])

    def sum_losses(losses):
        total, count = (losses.double() * batch["counts"]).sum(), batch["counts"].sum()
        both = torch.stack([total.detach(), count])
        dist.all_reduce(both, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return total, count.int(), both[0] / both[1]

    return losses, sum_losses


given = dict(argument.split("=") for argument in sys.argv[1:])  # tp=2 cp=2 attention=megatron
torch.cuda.current_device = lambda: "cpu"
tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)  # the kind that needs no GPU
dist.init_process_group("gloo")
say = print if dist.get_rank() == 0 else str
tp = int(given.get("tp", 1))
cp = int(given.get("cp", dist.get_world_size() // tp))
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
sizes |= {"tensor_model_parallel_size": tp, "context_parallel_size": cp, "params_dtype": torch.float64}
cpu = {"use_cpu_initialization": True, "gradient_accumulation_fusion": False}
config = TransformerConfig(**sizes, **cpu, attention_dropout=0.0, hidden_dropout=0.0, calculate_per_token_loss=True)
config.finalize_model_grads_func = finalize_model_grads  # divides gradients by the tokens of all ranks
with OnCpu():
    spec = get_gpt_layer_local_spec()  # on GPUs: get_gpt_layer_with_transformer_engine_spec()
    if given.get("attention") != "megatron":
        spec.submodules.self_attention.submodules.core_attention = MeshCoreAttention
    torch.manual_seed(0)
    model = GPTModel(config, spec, VOCABULARY, SEQ, position_embedding_type="rope").double()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.3, clip_grad=0.0), [model])
    text = torch.randint(VOCABULARY, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1))
    rows = text.chunk(dist.get_world_size() // (tp * cp))[parallel_state.get_data_parallel_rank()]
    whole = {"tokens": rows[:, :-1], "labels": rows[:, 1:], "counts": torch.ones(len(rows), SEQ).double()}
    whole = {name: pad(values, (0, -SEQ % (2 * cp))) for name, values in whole.items()}  # to 2·cp equal chunks
    fixed = {"model": model, "num_microbatches": 1, "seq_length": None, "micro_batch_size": None}
    for step in range(3):
        model.zero_grad_buffer()
        (loss,) = get_forward_backward_func()(forward_step_func=forward_step, data_iterator=iter([{**whole}]), **fixed)
        optimizer.step()
        say(f"step {step} loss {loss:.12f}")
    split = [getattr(parameter, "tensor_model_parallel", False) for parameter in model.parameters()]
    squares = sum(p.detach().square().sum() / (1 if s else tp) for p, s in zip(model.parameters(), split, strict=True))
    dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
say(f"weights {squares.sqrt():.12f}")
