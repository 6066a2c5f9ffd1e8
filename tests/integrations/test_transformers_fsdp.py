"""The callback for transformers on two gloo processes: weights that FSDP2 has split, and models that DDP has copied."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import optg
from optg.integrations.state_file import read_state
from tests.integrations.zeros import zeros

WORLD, STEPS = 2, 12


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def train_sharded(rank: int, port: int, folder: str, report: Any) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    from tests.torchvision_import import import_torchvision

    import_torchvision()
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from optg.integrations.state_file import fingerprint, read_state, whole
    from optg.integrations.transformers import STATE_FILE, Sparsify
    from tests.integrations.test_transformers import sentences, tiny_bert
    from tests.integrations.zeros import expected_zeros, zeros

    class ShardingTrainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            """Choose FSDP2 as accelerate does on a GPU. On a CPU it would choose DDP."""
            super().create_accelerator_and_postprocess()
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["BertLayer"]
            )
            self.accelerator.state.distributed_type, self.accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
            self.is_fsdp_enabled = True

    class CheckSaved(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            dist.barrier()
            saved = read_state(Path(folder, f"checkpoint-{state.global_step}", STATE_FILE))
            assert saved and saved["weights"] == fingerprint(model, callback.sparsifier.masks)
            for name, mask in callback.sparsifier.masks.items():
                assert torch.equal(whole(mask), saved["sparsifier"]["tensors"]["masks"][name]), name

    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 8,
    }
    arguments = TrainingArguments(folder, report_to="none", use_cpu=True, disable_tqdm=True, **options)
    callback = Sparsify("optg", sparsity=0.9)
    trainer = ShardingTrainer(tiny_bert(), arguments, train_dataset=sentences(), callbacks=[callback, CheckSaved()])
    trainer.train()
    parameters = dict(trainer.model.named_parameters())
    assert callback.sparsifier and callback.sparsifier.clock.step == STEPS
    assert all(isinstance(parameters[name], DTensor) for name in callback.sparsifier.masks)
    gathered = {name: whole(parameters[name]) for name in callback.sparsifier.masks}
    assert sum(int((weight == 0).sum()) for weight in gathered.values()) == expected_zeros(tiny_bert(), 0.9)
    for name, mask in callback.sparsifier.masks.items():
        assert not gathered[name][~whole(mask)].any(), name

    # the trainer's own checkpoint resumes bit for bit
    AcceleratorState._reset_state(reset_partial_state=False)
    resumed = Sparsify("optg", sparsity=0.9)
    arguments = TrainingArguments(folder, report_to="none", use_cpu=True, disable_tqdm=True, **options)
    trainer = ShardingTrainer(tiny_bert(), arguments, train_dataset=sentences(), callbacks=[resumed])
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-8")
    assert resumed.sparsifier and resumed.sparsifier.clock.step == STEPS
    for name, p in trainer.model.named_parameters():
        assert torch.equal(whole(p), whole(parameters[name])), name

    # DDP copies the model: every process has the same zeros
    AcceleratorState._reset_state(reset_partial_state=False)
    arguments = TrainingArguments(f"{folder}/ddp", report_to="none", use_cpu=True, disable_tqdm=True, **options)
    callback = Sparsify("optg", sparsity=0.9)
    trainer = Trainer(tiny_bert(), arguments, train_dataset=sentences(), callbacks=[callback])
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    assert zeros(trainer.model) == expected_zeros(trainer.model, 0.9)
    mine = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first)
    report.put(rank)
    dist.barrier()  # a process that exits early breaks the connections of the others
    os._exit(0)  # a normal exit sometimes aborts in torch's own threads


@pytest.mark.filterwarnings("ignore")
def test_the_gathered_model_is_exactly_sparse(tmp_path: Path) -> None:
    from optg.integrations.transformers import STATE_FILE  # here and above, because processes import torchvision first
    from tests.integrations.test_transformers import tiny_bert

    report = mp.get_context("spawn").SimpleQueue()
    mp.spawn(train_sharded, args=(free_port(), str(tmp_path), report), nprocs=WORLD)
    assert sorted(report.get() for _ in range(WORLD)) == list(range(WORLD))

    # the states are those of the bare model: one process can resume from either
    for saved in (tmp_path / "checkpoint-8", tmp_path / "ddp" / "checkpoint-8"):
        model = tiny_bert()
        optimizer = torch.optim.AdamW(model.parameters())
        sparsifier = optg.sparsify(model, optimizer, "optg", sparsity=0.9, steps=STEPS)
        state = read_state(saved / STATE_FILE)
        assert state
        sparsifier.load_state_dict(state["sparsifier"])
        assert sparsifier.clock.step == 8 and sparsifier.sparsity > 0.5
        assert zeros(model) >= sum(int((~mask).sum()) for mask in sparsifier.masks.values())
