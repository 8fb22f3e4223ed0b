"""A private name that the installed torch does not have is noticed: an error that names it, or a warning."""

from __future__ import annotations

import importlib.util
import json
import logging

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizer_module

from holdfast.core.base.errors import SetupError
from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.state.schedule import Schedulers
from holdfast.runtime.state.wrappers import unwrap
from holdfast.runtime.tensors import torch_private
from holdfast.runtime.update.gate import Gate
from holdfast.runtime.update.gradient_sync import GradientSync


def load_again():
    """Execute the module's code as the first import does, without replacing the imported module."""
    spec = importlib.util.spec_from_file_location("torch_private_again", torch_private.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def without(cls: type, name: str) -> type:
    """Return a subclass whose instances have no attribute of this name."""

    def refuse(self, wanted):
        if wanted == name:
            raise AttributeError(wanted)
        return super(made, self).__getattribute__(wanted)

    made = type(cls.__name__, (cls,), {"__getattribute__": refuse})
    return made


def test_the_installed_torch_has_every_name():
    load_again()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((torch, name) for name in ("_foreach_norm", "_foreach_mul_", "_foreach_copy_")),
        (optimizer_module, "_global_optimizer_post_hooks"),
        *((torch.utils.data._utils.worker, name) for name in ("_worker_info", "_generate_state")),
    ],
)
def test_missing_function_of_torch_fails_at_import(owner, name, monkeypatch):
    monkeypatch.delattr(owner, name)
    with pytest.raises(SetupError, match=f"torch {torch.__version__.split('+')[0]}.* has no .*{name}"):
        load_again()


@pytest.mark.parametrize("name", ["_version", "_indices", "_values"])
def test_missing_attribute_of_tensors_fails_at_import(name, monkeypatch):
    class WithoutIt:  # Tensor inherits these from a type that cannot be changed
        pass

    WithoutIt.__name__ = "Tensor"
    for other in {"_version", "_indices", "_values"} - {name}:
        setattr(WithoutIt, other, None)
    monkeypatch.setattr(torch, "Tensor", WithoutIt)
    with pytest.raises(SetupError, match=f"Tensor.{name}"):
        load_again()


@pytest.mark.parametrize("name", ["_parameters", "_modules", "_buffers"])
def test_missing_attribute_of_modules_fails_at_import(name, monkeypatch):
    monkeypatch.setattr(nn, "Module", without(nn.Module, name))
    with pytest.raises(SetupError, match=f"Module.{name}"):
        load_again()


def test_missing_hooks_of_optimizers_fail_at_import(monkeypatch):
    monkeypatch.setattr(torch.optim, "Optimizer", without(torch.optim.Optimizer, "_optimizer_step_post_hooks"))
    with pytest.raises(SetupError, match=r"Optimizer\._optimizer_step_post_hooks"):
        load_again()


SCALER_NAMES = ("_scale", "_growth_tracker", "_per_optimizer_states", "_lazy_init_scale_growth_tracker", "_device")


@pytest.mark.parametrize("name", SCALER_NAMES)
def test_missing_attribute_of_the_scaler_fails_when_it_is_wrapped(name):
    scaler = torch.amp.GradScaler("cpu")
    Scaler(scaler)
    scaler.__class__ = without(torch.amp.GradScaler, name)
    with pytest.raises(SetupError, match=f"GradScaler.{name}"):
        Scaler(scaler)


def test_fused_optimizer_that_does_not_report_found_inf_is_gated_on_the_host_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(torch_private, "_warned", set())
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    assert Gate(Optimizers([optimizer]), None, "auto", True, True).on_device
    del optimizer._step_supports_amp_scaling
    with caplog.at_level(logging.WARNING, "holdfast"):
        gates = [Gate(Optimizers([optimizer]), None, "auto", True, True) for _ in range(2)]
    assert not any(gate.on_device for gate in gates)
    (record,) = caplog.records
    assert "AdamW" in record.message and "_step_supports_amp_scaling" in record.message


def test_compiled_module_without_its_original_fails_when_it_is_unwrapped():
    class OptimizedModule(nn.Module):
        pass

    with pytest.raises(SetupError, match=r"OptimizedModule\._orig_mod"):
        unwrap(OptimizedModule())


def test_ddp_without_its_sync_flag_fails_when_the_run_begins():
    class DistributedDataParallel(nn.Module):
        pass

    with pytest.raises(SetupError, match=r"DistributedDataParallel\.require_backward_grad_sync"):
        GradientSync([("", DistributedDataParallel())])


class FakeParam:
    _unsharded_param: Tensor

    def __init__(self):
        self.unsharded_accumulated_grad = torch.ones(1)


class FakeRecord:
    def __init__(self, **values):
        vars(self).update(values)


class FSDPModule(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self._state = state

    def _get_fsdp_state(self):
        return self._state

    def reshard(self):
        pass


def run_state(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return RunState([("", module)], Optimizers([optimizer]), Schedulers([], []), None)


class ParamWithoutGrad:
    _unsharded_param: Tensor


class ParamWithoutGathered:
    unsharded_accumulated_grad = None


@pytest.mark.parametrize(
    ("state", "missing"),
    [
        (FakeRecord(), "_fsdp_param_groups"),
        (FakeRecord(_fsdp_param_groups=[FakeRecord()]), "fsdp_params"),
        (FakeRecord(_fsdp_param_group=FakeRecord()), "fsdp_params"),
        (FakeRecord(_fsdp_param_groups=[FakeRecord(fsdp_params=[ParamWithoutGrad()])]), "unsharded_accumulated_grad"),
        (FakeRecord(_fsdp_param_groups=[FakeRecord(fsdp_params=[ParamWithoutGathered()])]), "_unsharded_param"),
    ],
)
def test_other_internals_of_fsdp2_fail_when_the_run_begins(state, missing):
    with pytest.raises(SetupError, match=missing):
        run_state(FSDPModule(state))


def test_fsdp2_without_a_state_fails_when_the_run_begins(monkeypatch):
    monkeypatch.delattr(FSDPModule, "_get_fsdp_state")
    with pytest.raises(SetupError, match=r"FSDPModule\._get_fsdp_state"):
        run_state(FSDPModule(None))


@pytest.mark.parametrize("name", ["_fsdp_param_groups", "_fsdp_param_group"])
def test_accumulated_gradients_are_dropped_with_one_group_for_each_module_or_several(name):
    param = FakeParam()
    group = FakeRecord(fsdp_params=[param])
    module = FSDPModule(FakeRecord(**{name: [group] if name.endswith("s") else group}))
    run_state(module)
    torch_private.drop_accumulated_gradients(module)
    assert param.unsharded_accumulated_grad is None


class FakeDTensor:
    def to_local(self):
        return torch.ones(2)


def test_dtensor_without_its_spec_or_local_tensor_fails():
    with pytest.raises(SetupError, match=r"FakeDTensor\._spec"):
        torch_private.shard_like(FakeDTensor(), torch.ones(2))
    with pytest.raises(SetupError, match=r"FakeDTensor\._local_tensor"):
        torch_private.inner_tensor(FakeDTensor())


@pytest.mark.parametrize(
    ("has", "lacks"), [({}, "_layout"), ({"_layout": FakeRecord(remap_to_tensor=None)}, "_rank_map")]
)
def test_device_mesh_without_its_ranks_fails(has, lacks):
    with pytest.raises(SetupError, match=lacks):
        torch_private.mesh_slices(FakeRecord(**has))


def test_missing_default_store_fails(monkeypatch):
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_default_store")
    with pytest.raises(SetupError, match=r"_get_default_store"):
        torch_private.default_store(torch.distributed)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_ddp(**options):
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), **options)


def train_two_steps(model):
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2))  # torch publishes the order here


@pytest.mark.usefixtures("one_rank")
def test_a_bucket_order_is_set_without_a_trace_for_hooks_and_gradients():
    first, second, order = small_ddp(), small_ddp(), [1, 3, 0, 2]
    train_two_steps(first)
    assert torch_private.ddp_bucket_order(first) == [3, 2, 1, 0] and torch_private.ddp_bucket_order(second) is None
    weight, seen = second.module[0].weight, []
    weight.register_hook(seen.append)
    weight.register_post_accumulate_grad_hook(seen.append)
    gradient = weight.grad = torch.full_like(weight, 2.0)
    torch_private.order_ddp_buckets(second, order)
    assert seen == [] and weight.grad is gradient and gradient.eq(2.0).all() and second.module[0].bias.grad is None
    train_two_steps(second)
    assert torch_private.ddp_bucket_order(second) == order and len(seen) == 4, "the hooks are called again"
    torch_private.order_ddp_buckets(second, [3, 2, 1, 0])
    train_two_steps(second)
    assert torch_private.ddp_bucket_order(second) == order, "it was chosen for good"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("options", "order"),
    [({"static_graph": True}, [0, 1, 2, 3]), ({}, [0, 1]), ({"find_unused_parameters": True}, [0, 1, 2, 3])],
)
def test_a_bucket_order_of_another_kind_of_run_is_not_set(options, order):
    model = small_ddp(**options)
    torch_private.order_ddp_buckets(model, order)
    assert all(p.grad is None for p in model.parameters())
    train_two_steps(model)
    assert torch_private.ddp_bucket_order(model) != order


def test_the_flight_record_has_the_calls_of_every_recorder_once(monkeypatch):
    """NCCL has a recorder of its own; some versions have one for all."""
    c10d = torch._C._distributed_c10d

    def record(*names):
        entries = [{"profiling_name": name} for name in names]
        return lambda: json.dumps({"entries": entries, "pg_config": {names[0]: {}}}).encode()

    def found():
        content = json.loads(torch_private.dump_flight_record())
        return [entry["profiling_name"] for entry in content["entries"]], sorted(content["pg_config"])

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", record("gloo:a"), raising=False)
    monkeypatch.delattr(c10d, "_dump_nccl_trace_json", raising=False)
    assert found() == (["gloo:a"], ["gloo:a"])
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", record("nccl:b", "nccl:c"), raising=False)
    assert found() == (["nccl:b", "nccl:c", "gloo:a"], ["gloo:a", "nccl:b"])
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", record("gloo:a"))
    assert found() == (["gloo:a"], ["gloo:a"])
    monkeypatch.delattr(c10d, "_dump_nccl_trace_json")
    monkeypatch.delattr(c10d, "_dump_fr_trace_json")
    assert torch_private.dump_flight_record() is None
