"""On a machine with a GPU: CUDA runs equal CPU runs to float tolerance. Elsewhere these tests are skipped."""

from __future__ import annotations

import copy
import importlib
import itertools
import pkgutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import straight_line
import toy
from drawing_models import DRAWING
from fedentopt.errors import InputError
from fedentopt.models import build
from fedentopt.simulation import engine
from fedentopt.simulation import triton as triton_room
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData, torch_settings, without_cudnn
from fedentopt.simulation.engine import RunOptions, Stack, Task, run_stack
from fedentopt.simulation.feedback import KeptUpdates
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import RunPlanner
from fedentopt.simulation.trainers import StackedTrainer, StreamsTrainer, fused_convolutions, fused_layers
from fedentopt.simulation.trainers.fused_blocks import FusedForm
from fedentopt.simulation.trainers.masked_norm import masked_batch_norm
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import EVERY, WideForm, form_for, ops
from fedentopt.simulation.work import LocalCode, build_work
from second_stages import in_second_stage, spoilt_checkpoint
from straight_line import clients, world
from toy import METHODS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HARD = {"stragglers": 0.5, "dropout": 0.2, "epochs": 3, "rounds": 4, "lr": 0.02, "precision": "fp32-exact"}


def compare(configs, data, tolerance, **options):
    cpu = toy.run(configs, data, device="cpu")
    gpu = toy.run(configs, data, device="cuda", say=print, **options)
    for config, a, b in zip(configs, cpu, gpu, strict=True):
        assert [r.clients for r in a.records] == [r.clients for r in b.records]
        gap = toy.difference(a, b)
        print(f"{config.model} {config.method}: largest difference {gap:.2e}")
        assert gap < tolerance, config.method


def test_lenet_in_one_stack_for_every_algorithm():
    data = toy.images(samples=300, size=32, classes=10)
    configs = [toy.config(**(HARD | {"model": "lenet5", "clients": 10, "batch_size": 16} | m)) for m in METHODS[:-1]]
    compare(configs, data, 2e-4, trainer="stacked")


@pytest.mark.parametrize(
    "model", ["across", "contrast", "deciding", "sharper", "smoothed", "smoothed_data", "spectral_norm", "cumulative"]
)
def test_models_of_ones_own_that_padding_graphs_or_vmap_would_change(model):
    config = toy.config(model=f"odd_models:{model}", epochs=3, precision="fp32-exact")
    compare([config], toy.images(samples=90), 1e-4)


def test_fedconcat():
    data = toy.images(samples=300, size=32, classes=10)
    # Sixty rounds let rounding grow; a small learning rate keeps the comparison sharp.
    config = toy.config(**(HARD | {"model": "lenet5", "clients": 10} | METHODS[-1] | {"lr": 1e-3}))
    compare([config], data, 1e-4)


def concat_runs(model):
    """Second stages with other numbers of clusters, other cohorts, other starts, and rounds without anybody."""
    changes = [
        {}, {"seed": 1, "cohort": "6"}, {"seed": 2, "clusters": 3}, {"seed": 3, "cohort": "1"}, {"seed": 4},
        {"seed": 5, "clusters": 3, "concat_share": 0.1, "evaluate_every": 3},
    ]  # fmt: skip
    common = HARD | {"model": model} | METHODS[-1] | {"lr": 1e-3, "concat_share": 0.2}
    return [toy.config(**(common | change)) for change in changes]


@pytest.mark.parametrize(("model", "size"), [("lenet5", 32), ("toy:wide", 8), ("toy:branching", 8), ("toy:normed", 8)])
def test_second_stages_of_many_runs(model, size):
    compare(concat_runs(model), toy.images(samples=120, size=size), 2e-4)


@pytest.mark.parametrize(("model", "size"), [("lenet5", 32), ("toy:wide", 8)])
def test_a_diverged_second_stage_leaves_the_others_alone(model, size):
    data = toy.images(samples=120, size=size)
    bad, *good = concat_runs(model)[:3]
    memory = toy.Memory()
    memory.saved = spoilt_checkpoint(bad, data)
    # Started where the bad run stands, so that they train beside it.
    beside = []
    for config in good:
        straight = toy.Memory()
        run_stack([Task(config, straight)], data, RunOptions(device="cpu", checkpoint_every=1))
        beside.append(toy.Memory())
        beside[-1].saved = next(save for save in straight.saves if "head" in save[0].tensors)
        beside[-1].expected = straight.outcome
    tasks = [Task(c, m) for c, m in zip([bad, *good], [memory, *beside], strict=True)]
    outcomes = run_stack(tasks, data, RunOptions(device="cuda"))
    assert outcomes[0].diverged_round == memory.saved[0].round + 1
    assert outcomes[0].records[-1].accuracy == pytest.approx(100 / 3)
    for outcome, other in zip(outcomes[1:], beside, strict=True):
        assert outcome.diverged_round is None
        assert toy.difference(outcome, other.expected) < 2e-4


def test_a_second_stage_never_waits_for_the_device():
    stack = in_second_stage(concat_runs("lenet5"), toy.images(samples=120, size=32), "cuda")
    for _ in range(2):  # kernels are compiled and test features computed
        stack._tick(stack.runs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stack._tick(stack.runs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("model", "trainer"), [("lenet5", "stacked"), ("toy:wide", "stacked"), ("toy:normed", "streams")]
)
def test_an_algorithm_that_reads_losses_and_the_round(model, trainer):
    data = toy.images(samples=300 if model == "lenet5" else 90, size=32 if model == "lenet5" else 8)
    fair = toy.config(**(HARD | {"model": model, "algorithm": "own_methods:Fair", "algorithm.noise": 0.0}))
    compare([fair, toy.config(**(HARD | {"model": model}))], data, 5e-4, trainer=trainer)


@pytest.mark.parametrize("model", ["toy:linear", "toy:branching"])
def test_other_stacked_models(model):
    configs = [toy.config(**(HARD | {"model": model} | m)) for m in METHODS[:-1]]
    compare(configs, toy.images(samples=90), 1e-4, trainer="stacked")


@pytest.mark.parametrize("model", ["toy:wide", "toy:dropping"])
def test_wide_convolutions(model):
    configs = [toy.config(**(HARD | {"model": model} | m)) for m in METHODS[:-1]]
    compare(configs, toy.images(samples=90), 5e-4, trainer="stacked")


def test_wide_encoders():
    concat = toy.config(**(HARD | {"model": "toy:wide"} | METHODS[-1] | {"lr": 1e-3}))
    compare([concat], toy.images(samples=90), 1e-4)


@pytest.mark.parametrize("model", ["toy:normed", "toy:branching", "toy:dropping"])
def test_streams(model):
    configs = [toy.config(**(HARD | {"model": model} | m)) for m in METHODS[:-1]]
    compare(configs, toy.images(samples=90), 5e-4, trainer="streams")


def test_grey_images_and_augmentation():
    data = toy.images(samples=120, size=32, channels=1)
    compare([toy.config(**(HARD | {"model": "lenet5"}))], data, 2e-4)


def test_a_diverged_run_leaves_the_others_alone():
    data = toy.images(samples=120, size=32)
    good, bad = (toy.config(model="lenet5", rounds=6, precision="fp32-exact", lr=lr) for lr in (0.01, 1e12))
    outcomes = toy.run([good, bad], data, device="cuda")
    assert outcomes[0].diverged_round is None
    assert outcomes[1].diverged_round is not None
    assert toy.difference(outcomes[0], toy.run([good], data, device="cuda")[0]) < 1e-4
    assert outcomes[1].records[-1].accuracy == pytest.approx(100 / 3)


def test_streams_with_more_clients_than_slots_and_a_longer_second_round():
    # Few large clients and many small ones: rounds differ in length, and buffers grow after graphs were captured.
    data = toy.images(samples=1500)
    settings = HARD | {"model": "toy:dropping", "clients": 24, "cohort": "14", "partition": "dir:0.1", "batch_size": 4}
    configs = [toy.config(**(settings | m)) for m in ({"algorithm": "fedavg"}, {"algorithm": "scaffold"})]
    compare(configs, data, 5e-4, trainer="streams")


# Trainers by themselves: the losses they tell, and local objectives that are code.

CUDA = torch.device("cuda")
NETS = [
    ("lenet5", "stacked"), ("toy:branching", "stacked"), ("toy:wide", "stacked"), ("toy:dropping", "stacked"),
    ("toy:normed", "streams"), ("toy:dropping", "streams"), ("toy:branching", "streams"),
]  # fmt: skip
NORMED = ("toy:wide_normed", "stacked")


@pytest.fixture
def exact():
    with torch_settings(CUDA, "fp32-exact"):
        yield


def canonical(made, models):
    """Models of worlds whose rows lie in other orders, in one order."""
    return made.layout.to_canonical(models)


@pytest.mark.parametrize("form", [WideForm(), EVERY], ids=["plain", "every"])
def test_batch_norm_in_stacks(exact, form, monkeypatch):
    """Uneven clients, lone values among their batches: models, running statistics and losses of the loop trainer."""
    count_as_large(monkeypatch)
    monkeypatch.setattr(triton_room, "form_for", lambda device: form)
    gpu, cpu = world("toy:wide_normed", "stacked", CUDA), world("toy:wide_normed", "loop")
    assert isinstance(gpu.trainer.net, WideNet)
    rows = clients(9)
    expected = cpu.trainer.train(cpu.starts, cpu.work(rows, wants_losses=True))
    for others in ([], [], clients(5)):  # captured, replayed, replayed after a round of other clients
        if others:
            gpu.trainer.train(gpu.starts, gpu.work(others))
        found = gpu.trainer.train(gpu.starts, gpu.work(rows, wants_losses=True))
        pairs = (gpu.layout.to_canonical(found.models), cpu.layout.to_canonical(expected.models))
        torch.testing.assert_close(*pairs, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(found.losses.cpu(), expected.losses, atol=2e-3, rtol=2e-3)
    images = cpu.data.test_images
    logits = gpu.trainer.predict(found.models, images.to(CUDA)).cpu(), cpu.trainer.predict(expected.models, images)
    torch.testing.assert_close(*logits, atol=1e-2, rtol=1e-2)


def test_second_stages_of_batch_norm_in_stacks():
    # One unit in the last place of the start weights moves the CPU's own models by up to 1.4e-2 in batches of eight,
    # and by 3.5e-4 in batches of 32, where a value lies at a kink. At a tenth of the rate sixteen units move them by
    # up to 2.1e-5 (20 draws), and training does by 2.6e-3 to 1.3e-2.
    configs = [config.replace(batch_size=32, lr=1e-4) for config in concat_runs("toy:wide_normed")]
    compare(configs, toy.images(samples=120, size=4), 1e-4, trainer="stacked")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_same_bits_of_batch_norm_in_any_stack(precision):
    data = toy.images(samples=600, size=32, classes=10)
    common = SHORT | {"model": "vgg11-bn", "precision": precision, "batch_size": 64}
    config, said = toy.config(**common, algorithm="scaffold"), []
    alone = toy.run([config], data, device="cuda", say=said.append)[0]
    assert "wide convolutions" in said[0]
    assert all(value.isfinite().all() for value in alone.model.values())
    for size in (1, 2, 7):
        beside = others(size - 1, common)
        place = size // 2
        stack = [*beside[:place], config, *beside[place:]]
        assert_same_bits(alone, toy.run(stack, data, device="cuda")[place], f"{size} runs")


@pytest.mark.parametrize(("name", "size"), [("vgg11-bn", 32)])
@pytest.mark.parametrize(("precision", "forward", "backward"), [("fp32", 3e-2, 0.3), ("bf16", 3e-2, 0.7)])
def test_a_step_of_batch_norm_in_stacks(name, size, precision, forward, backward):
    """Of VGG-11, whose layers take kernels that those of small models do not, against float64.

    With operands rounded as the precision does, statistics and logits, which have no kinks, move on the CPU by up to
    8e-3 under TF32 and 5e-3 under bf16, gradients by up to 0.12 and 0.38 (6 draws).
    """
    data = toy.images(samples=3 * 64, size=size, classes=10)
    models = [build(name, 10, seed=seed, image_size=size) for seed in (5, 6, 7)]
    layout = FlatLayout(models[0], channels_last=True)
    place, transform = DeviceData.place(data, CUDA), ImageTransform(data.mean, data.std)
    starts = torch.stack([layout.pack(model.state_dict()) for model in models]).to(CUDA)
    same = {"lr": 0.1, "weight_decay": 0.0, "mu": 0.0, "logit_scale": None, "logit_shift": None, "correction_mode": 0}
    rows = [
        replace(row, task=replace(row.task, samples=np.arange(64 * k, 64 * k + 64), epochs=1, batch_size=64), **same)
        for k, row in enumerate(clients(3))
    ]
    with torch_settings(CUDA, precision):
        trainer = StackedTrainer(models[0], layout, place, transform, ops(CUDA, bf16=precision == "bf16"))
        work = build_work(rows, 64, 10, CUDA)
        trained = trainer.train(starts, work).models
        found = trainer.predict(trained, place.test_images).cpu()
        trainer.close()
    own, test = (transform.standardise(torch.from_numpy(x)).double() for x in (data.x_train, data.x_test))
    for i, k in enumerate(work.source.tolist()):
        model = models[k].double().train()
        part = slice(64 * k, 64 * k + 64)
        F.cross_entropy(model(own[part]), torch.from_numpy(data.y_train[part])).backward()
        moved = layout.unpack(trained[i])
        pairs = [(moved[key].double(), value.clone().double(), forward, key) for key, value in model.named_buffers()]
        for key, value in model.named_parameters():
            step = (value.detach() - moved[key].double()) / 0.1
            if value.grad.norm() < 1e-12:  # of a bias that BatchNorm takes away again
                assert not step.any(), key
            else:
                pairs.append((step, value.grad, backward, key))
        model.load_state_dict(moved)
        pairs.append((found[i].double(), model.eval()(test).detach(), forward, "logits"))
        for mine, its, near, key in pairs:
            gap = float((mine - its).norm() / its.norm())
            print(f"{precision} {key}: relative difference {gap:.1e}")
            assert gap < near, key


@pytest.mark.parametrize(("name", "trainer"), NETS)
def test_losses_of_training(exact, name, trainer):
    gpu, cpu = world(name, trainer, CUDA), world(name, "loop")
    rows = clients(9)
    models, losses = straight_line.train(cpu, cpu.work(rows))
    models = canonical(cpu, models)
    # Captured, replayed, replayed after a round that did not want any, and after one of other clients.
    for extra in ([], [], clients(9), clients(5)):
        if extra:
            plain = gpu.trainer.train(gpu.starts, gpu.work(extra))
            assert plain.losses is None
            if len(extra) == len(rows):
                torch.testing.assert_close(canonical(gpu, plain.models), models, atol=5e-4, rtol=1e-3)
        told = gpu.trainer.train(gpu.starts, gpu.work(rows, wants_losses=True))
        assert told.losses.is_cuda
        assert told.losses.dtype == torch.float32
        gap = float((told.losses.cpu().double() - losses).abs().max())
        print(f"{name} {trainer}: largest difference of a loss {gap:.1e}")
        torch.testing.assert_close(told.losses.cpu().double(), losses, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(canonical(gpu, told.models), models, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize(("name", "trainer"), [*NETS, NORMED])
def test_losses_never_make_the_host_wait(exact, name, trainer):
    made = world(name, trainer, CUDA)
    work = made.work(clients(9), wants_losses=True)
    for _ in range(2):  # kernels are compiled and steps captured
        made.trainer.train(made.starts, work)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.trainer.train(made.starts, work)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("name", "trainer"), [*NETS, NORMED])
def test_questions_never_make_the_host_wait(exact, name, trainer):
    made = world(name, trainer, CUDA)
    own = [np.arange(30), np.arange(50, 61), np.zeros(0, dtype=np.int64), np.arange(70, 90)]
    before = made.trainer.mean_losses(made.starts, [2, 0, 1, 2], own).read()  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        queued = made.trainer.mean_losses(made.starts, [2, 0, 1, 2], own)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made.starts.zero_()  # queued behind the questions, which must have seen the models as they were
    np.testing.assert_allclose(queued.read(), before, rtol=1e-5)
    assert np.isnan(before).tolist() == [False, False, True, False]


@pytest.mark.parametrize("trainer", ["stacked", "streams"])
def test_losses_of_a_stack_in_parts(exact, trainer):
    made = world("toy:branching", trainer, CUDA)
    work = made.work(clients(9), wants_losses=True)
    whole = made.trainer.train(made.starts, work).losses
    while made.trainer.shrink():
        torch.testing.assert_close(made.trainer.train(made.starts, work).losses, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "trainer"), [*NETS, NORMED])
def test_mean_losses(exact, name, trainer):
    gpu, cpu = world(name, trainer, CUDA), world(name, "loop")
    rng = np.random.default_rng(0)
    own = [rng.permutation(120)[: int(size)] for size in rng.integers(1, 120, 40)] + [np.zeros(0, dtype=np.int64)]
    rows = [int(row) for row in rng.integers(0, 3, 41)]
    found, expected = (made.trainer.mean_losses(made.starts, rows, own).read() for made in (gpu, cpu))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert np.isnan(found[-1])
    # Training afterwards is in training mode again.
    work = [made.work(clients(5), wants_losses=True) for made in (gpu, cpu)]
    told = [made.trainer.train(made.starts, w).losses.cpu() for made, w in zip((gpu, cpu), work, strict=True)]
    torch.testing.assert_close(*told, atol=2e-4, rtol=2e-4)


def contrast(model, start, batch, context):
    """Cross-entropy, a proximal term, and features against the start's and the previous model's."""
    loss = F.cross_entropy(model(batch.x), batch.y)
    loss = loss + 0.1 * sum(((p - s) ** 2).sum() for p, s in zip(model.parameters(), start.parameters(), strict=True))
    if context.previous is not None:
        z, near, far = (context.features(m, batch.x) for m in (model, start, context.previous))
        sides = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, far)])
        loss = loss - torch.log_softmax(sides / 0.5, 0)[0].mean()
    return loss + 0.01 * context.lr * context.vectors["own"].sum()


def plain_loss(model, start, batch, context):
    return F.cross_entropy(model(batch.x), batch.y)


def with_code(made, rows, loss):
    """Every third client without; every second of the others has trained before."""
    coded = []
    for k, row in enumerate(rows):
        vectors = {"own": torch.ones(made.layout.parameter_width, device=made.starts.device)}
        previous = made.starts[(k + 1) % 3] if k % 2 else None
        code = LocalCode(loss, "mine", k, 1, row.task.label_counts, vectors, previous)
        coded.append(replace(row, code=code if k % 3 else None))
    return coded


@pytest.mark.parametrize("name", ["toy:normed", "toy:dropping", "toy:branching"])
def test_local_objectives_that_are_code(exact, name):
    gpu, cpu = world(name, "streams", CUDA), world(name, "loop")
    rows = clients(9)
    expected = cpu.trainer.train(cpu.starts, cpu.work(with_code(cpu, rows, contrast), wants_losses=True))
    for wanted in (False, True, True):
        told = gpu.trainer.train(gpu.starts, gpu.work(with_code(gpu, rows, contrast), wants_losses=wanted))
        torch.testing.assert_close(canonical(gpu, told.models), canonical(cpu, expected.models), atol=5e-4, rtol=1e-3)
        if wanted:
            torch.testing.assert_close(told.losses.cpu(), expected.losses, atol=2e-4, rtol=2e-4)
    # And the built-in objective written as code, beside captured steps of the clients without.
    plain = [replace(row, logit_scale=None, logit_shift=None) for row in rows]
    built_in, as_code = (
        gpu.trainer.train(gpu.starts, gpu.work(some)).models for some in (plain, with_code(gpu, plain, plain_loss))
    )
    torch.testing.assert_close(as_code, built_in, atol=5e-4, rtol=1e-3)


def test_code_under_bf16():
    with torch_settings(CUDA, "bf16"):
        made = world("toy:branching", "streams", CUDA)
        made.trainer = StreamsTrainer(
            build("toy:branching", straight_line.CLASSES, seed=5, image_size=8), made.layout, made.data, made.transform,
            ops(CUDA, bf16=True), 2, "bf16",
        )  # fmt: skip
        rows = clients(6, logit_scale=None, logit_shift=None)
        built_in, as_code = (
            made.trainer.train(made.starts, made.work(some)).models
            for some in (rows, with_code(made, rows, plain_loss))
        )
        assert float((as_code - built_in).abs().max()) < 1e-2


def test_code_that_is_wrong_is_refused_and_the_trainer_goes_on(exact):
    made = world("toy:normed", "streams", CUDA)
    rows = clients(9)
    before = made.trainer.train(made.starts, made.work(rows)).models

    def wrong(model, start, batch, context):
        return model(batch.x)

    with pytest.raises(InputError, match="algorithm: mine: local_loss returned a tensor of shape"):
        made.trainer.train(made.starts, made.work(with_code(made, rows, wrong)))
    after = made.trainer.train(made.starts, made.work(rows)).models
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", DRAWING)
def test_layers_that_draw_draw_the_same_on_cpu_and_gpu(name):
    sizes = {"clients": 4, "cohort": "2", "rounds": 2, "epochs": 1, "batch_size": 16, "lr": 0.05, "partition": "iid"}
    config = toy.config(model=f"drawing_models:{name}", precision="fp32-exact", **sizes)
    compare([config, config.replace(seed=3)], toy.images(), 1e-4)


# Padded batches of BatchNorm: graphs of few sizes, whose statistics leave padding out.


def both_ways(name, size, batch, precision, form=None, **same):
    """Trainers on CUDA that pad partial batches, and that run them at their real sizes; and their work."""
    data = toy.images(samples=120, classes=4, size=size)
    model = build(name, 4, seed=5, image_size=size)
    layout = FlatLayout(model, channels_last=True)
    place, transform = DeviceData.place(data, CUDA), ImageTransform(data.mean, data.std, 0.2, 0.5, 0.1)
    kernels = ops(CUDA, exact=precision == "fp32-exact", bf16=precision == "bf16")
    made = [
        StreamsTrainer(model, layout, place, transform, kernels, 3, precision, masks=m, form=form)
        for m in (None, False)
    ]
    rows = [replace(row, correction_mode=0, start_row=0, task=replace(row.task, batch_size=batch), **same)
            for row in clients(9)]  # fmt: skip
    starts = layout.pack(model.state_dict())[None].to(CUDA)
    return made, starts, build_work(rows, batch, 4, CUDA, wants_losses=True)


def moved(layout, models, starts):
    """How far parameters and statistics have come, by client."""
    parts = (models - starts).split([layout.parameter_width, layout.width - layout.parameter_width], 1)
    return [part.double() for part in parts]


@pytest.mark.parametrize(
    ("name", "size", "precision", "near", "form"),
    [
        ("toy:normed", 8, "fp32-exact", 1e-4, None),
        ("toy:normed", 8, "fp32-exact", 1e-4, FusedForm()),
        ("toy:normed", 8, "bf16", 3e-2, None),
        ("efficientnet-b0", 64, "fp32-exact", 5e-2, None),
        ("efficientnet-b0", 64, "fp32-exact", 5e-2, FusedForm()),
        ("efficientnet-lite0", 64, "fp32-exact", 3e-1, None),  # ReLU's kinks: rounding alone moves gradients by a tenth
    ],
)
def test_padded_batches_train_as_unpadded_ones(name, size, precision, near, form):
    # So small a learning rate that rounding does not grow from step to step: deep networks double it many times over.
    with torch_settings(CUDA, precision):
        (padded, plain), starts, work = both_ways(name, size, 20, precision, form, lr=1e-5, mu=0.0)
        assert padded.masks
        assert not plain.masks
        expected = plain.train(starts, work)
        few = torch.from_numpy(work.sizes >= 5).to(CUDA)  # a lone sample's maps of four pixels have next to no variance
        for _ in range(3):  # captured, replayed, replayed
            found = padded.train(starts, work)
            torch.testing.assert_close(found.losses, expected.losses, atol=near, rtol=near)
            for mine, its in zip(
                *(moved(padded.layout, t.models[few], starts) for t in (found, expected)), strict=True
            ):
                gap = (mine - its).norm(dim=1) / its.norm(dim=1)
                print(f"{name} {precision}: relative difference of a movement {float(gap.max()):.1e}")
                assert float(gap.max()) < near
        forms = {batch for slot in padded._slots for batch, _ in slot.graphs}
        assert {form.size for form in forms if form.masked} == {3, 6, 9, 15, 18, 20}


def test_padded_batches_never_make_the_host_wait(exact):
    (padded, _), starts, work = both_ways("toy:normed", 8, 20, "fp32-exact")
    for _ in range(2):
        padded.train(starts, work)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        padded.train(starts, work)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 24, 14, 14), (8, 320, 7, 7), (9, 5, 1, 1), (7, 6), (5, 3, 11)])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_masked_statistics(dtype, shape, memory):
    generator = torch.Generator().manual_seed(0)
    x, push = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    x = 2 * x + 3
    if len(shape) == 4:
        x, push = x.contiguous(memory_format=memory), push.contiguous(memory_format=memory)
    x, push = x.to(dtype), push.to(dtype)
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)]
    near = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 3e-2}[dtype]
    for n in (2, shape[0] // 2 + 1, shape[0]):
        exact, norm = kind(shape[1]).double(), kind(shape[1]).to(CUDA)
        norm = norm.double() if dtype == torch.float64 else norm
        wide = x[:n].double().clone().requires_grad_()
        expected = exact(wide)
        expected.backward(push[:n].double())
        here = x.to(CUDA, copy=True).requires_grad_()
        real = torch.arange(shape[0], device=CUDA) < n
        y = masked_batch_norm(norm, here, real)
        y.backward(torch.where(real.view(-1, *(1,) * (x.dim() - 1)), push.to(CUDA), 0))
        assert y.dtype == dtype
        assert not here.grad[n:].any()
        pairs = [(y[:n], expected), (here.grad[:n], wide.grad), *zip(norm.buffers(), exact.buffers(), strict=True)]
        scale = expected.numel() / shape[1]  # gradients of weights are sums over so many values
        pairs += [(p.grad / scale, q.grad / scale) for p, q in zip(norm.parameters(), exact.parameters(), strict=True)]
        for mine, its in pairs:
            torch.testing.assert_close(mine.detach().cpu().double(), its.detach().double(), atol=near, rtol=near)


# Same bits: a run alone, again, and beside others; see `support/stacks_interpreted.py` for the kernels one by one.

STACKS = {"lenet5": (2, 7, 40), "vgg11": (2, 7)}
SHORT = {"clients": 12, "cohort": "5", "rounds": 3, "epochs": 1, "lr": 0.02, "evaluate_every": 1}


def others(number: int, common: dict[str, object]) -> list[object]:
    """So many configs of other methods, seeds, cohorts and lengths."""
    made = [m for m in METHODS if m["algorithm"] != "fedconcat"]
    changes = [{}, {"cohort": "3"}, {"stragglers": 0.5, "epochs": 3}, {"lr": 0.05}]
    return [
        toy.config(**(common | made[i % len(made)] | changes[i % len(changes)] | {"seed": 10 + i}))
        for i in range(number)
    ]


def assert_same_bits(a, b, what):
    assert a.model.keys() == b.model.keys()
    for name, value in a.model.items():
        assert torch.equal(value, b.model[name]), (what, name, float((value - b.model[name]).abs().max()))
    assert [(r.clients, r.accuracy, r.loss) for r in a.records] == [(r.clients, r.accuracy, r.loss) for r in b.records]


@pytest.mark.parametrize("model", STACKS)
@pytest.mark.parametrize(("algorithm", "precision"), [("fednova", "fp32"), ("scaffold", "fp32"), ("scaffold", "bf16")])
def test_same_bits_alone_and_in_any_stack(model, algorithm, precision):
    data = toy.images(samples=600, size=32, classes=10)
    common = SHORT | {"model": model, "precision": precision, "batch_size": 16 if model == "lenet5" else 64}
    config = toy.config(**common, algorithm=algorithm)
    alone = toy.run([config], data, device="cuda")[0]
    assert all(value.isfinite().all() for value in alone.model.values())
    assert_same_bits(alone, toy.run([config], data, device="cuda")[0], "again")
    for size in STACKS[model]:
        beside = others(size - 1, common)
        place = size // 2
        stack = [*beside[:place], config, *beside[place:]]
        assert_same_bits(alone, toy.run(stack, data, device="cuda")[place], f"{size} runs")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", STACKS)
def test_same_bits_of_models_averaged_where_they_were_trained(model, precision, monkeypatch):
    """Or copied out of the trainer's memory first."""
    data = toy.images(samples=600, size=32, classes=10)
    common = SHORT | {"model": model, "precision": precision, "batch_size": 16 if model == "lenet5" else 64}
    configs = [toy.config(**common, algorithm=name) for name in ("fedavg", "fednova")]
    lent, seen = toy.run(configs, data, device="cuda"), []
    original = StackedTrainer.train

    def train(self, starts, work, *, lend=False):
        seen.append(lend)
        return original(self, starts, work)

    monkeypatch.setattr(StackedTrainer, "train", train)
    for a, b in zip(lent, toy.run(configs, data, device="cuda"), strict=True):
        assert_same_bits(a, b, "copied")
    assert seen
    assert all(seen)


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m["algorithm"] in ("fedentropy", "fedconcat", "fedlc")], ids=str
)
def test_same_bits_of_methods_that_judge_or_concatenate(method):
    data = toy.images(samples=300, size=32, classes=10)
    common = SHORT | {"model": "lenet5"}
    config = toy.config(**(common | method | {"lr": 1e-3}))
    alone = toy.run([config], data, device="cuda")[0]
    stack = [*others(3, common), config, config.replace(seed=5, cohort="2")]
    assert_same_bits(alone, toy.run(stack, data, device="cuda")[3], "beside others")


@pytest.mark.parametrize("model", STACKS)
def test_same_bits_when_resumed_beside_others(model):
    data = toy.images(samples=300, size=32, classes=10)
    common = SHORT | {"model": model}
    config = toy.config(**common, algorithm="scaffold")
    straight, resumed = toy.Memory(), toy.Memory()
    outcome = run_stack([Task(config, straight)], data, RunOptions(device="cuda", checkpoint_every=1))[0]
    resumed.saved = straight.saves[0]
    beside = [Task(other, toy.Memory()) for other in others(2, common)]
    again = run_stack([*beside, Task(config, resumed)], data, RunOptions(device="cuda"))[2]
    assert_same_bits(outcome, again, "resumed")


TOLD = ["hics-fl", "clustered-update", "divfl", "oort", "rpow-d", "inferred", "cpow-d", "random", "fedentopt"]


def told_runs(**settings):
    """Runs whose selectors are told something, beside some whose are not, one that diverges and one that ends early."""
    common = SHORT | {"model": "lenet5", "rounds": 7, "dropout": 0.2, "evaluate_every": 2} | settings
    runs = [toy.config(**common, selector=name, seed=i) for i, name in enumerate(TOLD)]
    return [*runs, runs[0].replace(seed=20, lr=1e30), runs[1].replace(seed=21, rounds=4)]


@pytest.mark.parametrize(
    "settings", [{}, {"algorithm": "scaffold", "partition": "dir:0.1"}], ids=["fedavg", "scaffold"]
)
def test_same_bits_in_two_parts(settings, monkeypatch):
    data, configs = toy.images(samples=600, size=32, classes=10), told_runs(**settings)
    ticks = []
    tick = Stack._tick
    monkeypatch.setattr(Stack, "_tick", lambda self, runs: ticks.append(len(runs)) or tick(self, runs))
    found = []
    for many in (10**9, 1):
        ticks.clear()
        monkeypatch.setattr(engine, "MANY_WAIT", many)
        found.append(toy.run(configs, data, device="cuda", checkpoint_every=3))
        assert len(ticks) == (7 if many > 1 else 14)
    for config, whole, parted in zip(configs, *found, strict=True):
        assert whole.diverged_round == parted.diverged_round
        assert_same_bits(whole, parted, config.method)


@pytest.mark.parametrize(("model", "most"), [("lenet5", 20), ("toy:wide", 9)])
@pytest.mark.parametrize("selector", ["pow-d", "cpow-d"])
def test_same_bits_of_runs_that_ask_alone_in_stacks_and_resumed(selector, model, most, monkeypatch):
    """Asked when a round is planned, and ahead of it, in one part and in two."""
    size = 32 if model == "lenet5" else 8
    data = toy.images(samples=600, size=size, classes=10)
    common = SHORT | {"model": model, "rounds": 6, "dropout": 0.2, "evaluate_every": 2, "selector": selector}
    config = toy.config(**common, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(RunPlanner, "asks_ahead", property(lambda self: False))
        alone = toy.run([config], data, device="cuda")[0]
    assert_same_bits(alone, toy.run([config], data, device="cuda")[0], "asked ahead")
    kinds = ["pow-d", "cpow-d", "random", "oort", "pow-d"]
    beside = [toy.config(**common | {"selector": kinds[i % 5]}, seed=10 + i) for i in range(most - 1)]
    stack = [*beside[: most // 2], config, *beside[most // 2 :]]
    ticks, tick = [], Stack._tick
    monkeypatch.setattr(Stack, "_tick", lambda self, runs: ticks.append(len(runs)) or tick(self, runs))
    for many, parts in ((10**9, 1), (engine.MANY_WAIT if most > 9 else 2, 2)):
        monkeypatch.setattr(engine, "MANY_WAIT", many)
        ticks.clear()
        memories = [toy.Memory() for _ in stack]
        tasks = [Task(c, m) for c, m in zip(stack, memories, strict=True)]
        found = run_stack(tasks, data, RunOptions(device="cuda", checkpoint_every=2))
        assert len(ticks) == 6 * parts
        assert_same_bits(alone, found[most // 2], f"in {parts} part(s)")
        for memory in memories:
            memory.saved, memory.records = memory.saves[0], list(memory.saves[0][1])
        again = run_stack(tasks, data, RunOptions(device="cuda"))
        for cfg, a, b in zip(stack, found, again, strict=True):
            assert_same_bits(a, b, f"{cfg.method} resumed")


def test_same_bits_of_kept_updates_resumed_and_beside_others():
    data = toy.images(samples=600, size=32, classes=10)
    config = toy.config(**SHORT | {"model": "lenet5", "rounds": 6}, selector="clustered-update")
    straight, resumed = toy.Memory(), toy.Memory()
    alone = run_stack([Task(config, straight)], data, RunOptions(device="cuda", checkpoint_every=2))[0]
    resumed.saved, resumed.records = straight.saves[0], list(straight.saves[0][1])
    beside = [Task(other, toy.Memory()) for other in told_runs()]
    assert_same_bits(alone, run_stack([*beside, Task(config, resumed)], data, RunOptions(device="cuda"))[-1], "resumed")


def test_cosines_of_kept_updates_equal_those_on_the_cpu():
    drawn = torch.Generator().manual_seed(0)
    kept = {device: KeptUpdates(9, 20_000, torch.device(device)) for device in ("cpu", "cuda")}
    for who, scale in (((1, 4, 7), 1.0), ((4, 2, 0), 1e25), ((8, 7, 1), 1e-25)):
        changes = torch.randn(3, 20_000, generator=drawn) * scale
        changes[1, 5] = torch.nan if scale > 1 else changes[1, 5]
        changes[2] *= scale >= 1
        on_device = changes.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = kept["cuda"].cosines(who, on_device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = kept["cpu"].cosines(who, changes)
        torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=0, equal_nan=True)
        rows = kept["cuda"].rows.cpu()
        torch.testing.assert_close(rows, kept["cpu"].rows, atol=1e-6, rtol=1e-5, equal_nan=True)


FORMS = {
    "first": WideForm(first=True), "update": WideForm(update=True), "descriptors": WideForm(descriptors=True),
    "all": WideForm(first=True, update=True, descriptors=True), "aside": WideForm(update=True, aside=True),
    "joined": WideForm(descriptors=True, joined=True), "every": EVERY,
}  # fmt: skip


def count_as_large(monkeypatch):
    """Layers as small as a test's are taken as large ones are."""
    for name, value in (("wide_update.SHARED", 1), ("wide_pooled.NARROWEST", 2)):
        monkeypatch.setattr(f"fedentopt.simulation.triton.{name}", value)


@pytest.mark.parametrize("precision", ["fp32-exact", "fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_wide_convolutions_in_other_forms(form, precision, monkeypatch):
    """They come to what the usual form comes to; what is summed in another order differs by its rounding."""
    common = HARD | {"model": "toy:wide", "algorithm": "scaffold", "batch_size": 32}
    config = toy.config(**(common | {"precision": precision}))
    data = toy.images(samples=90)
    chosen = {"form": WideForm()}
    monkeypatch.setattr(triton_room, "form_for", lambda device: chosen["form"])
    usual = toy.run([config], data, device="cuda", trainer="stacked")[0]
    count_as_large(monkeypatch)
    chosen["form"] = FORMS[form]._replace(untransposed=True)
    other = toy.run([config], data, device="cuda", trainer="stacked")[0]
    gap = toy.difference(usual, other)
    print(f"{form}, {precision}: largest difference {gap:.1e}")
    assert gap < {"fp32-exact": 1e-4, "fp32": 5e-3, "bf16": 5e-2}[precision]


@pytest.mark.parametrize("exact", [False, True], ids=["TF32", "fp32"])
@pytest.mark.parametrize(
    ("name", "form"),
    [("lenet5", WideForm()), ("toy:wide", WideForm()), ("toy:wide", FORMS["all"]), ("toy:wide", FORMS["every"])],
    ids=str,
)
def test_same_bits_of_a_client_beside_any_number(name, exact, form, monkeypatch):
    """Its model and its loss, from one client to many: prefixes of all lengths, finished rows among them."""
    if form.update:
        count_as_large(monkeypatch)
    with torch_settings(CUDA, "fp32-exact" if exact else "fp32"):
        made = world(name, "stacked", CUDA)
        size = straight_line.SIZES.get(name, 8)
        module = build(name, straight_line.CLASSES, seed=5, image_size=size)
        trainer = StackedTrainer(module, made.layout, made.data, made.transform, ops(CUDA, exact=exact, form=form))
        first, *rest = clients(9)
        alone = trainer.train(made.starts, made.work([first], wants_losses=True))
        for number in (2, 3, 9, 17, 64, 130):
            beside = [replace(rest[i % len(rest)], order_key=1000 + i) for i in range(number - 1)]
            work = made.work([first, *beside], wants_losses=True)
            many = trainer.train(made.starts, work)
            place = int(np.flatnonzero(work.source == 0)[0])
            assert torch.equal(many.models[place], alone.models[0]), number
            assert torch.equal(many.losses[place], alone.losses[0]), number


@pytest.mark.parametrize(
    ("name", "form", "precision"),
    [
        *itertools.product(["toy:wide"], ["update", "aside", "all", "every"], ["fp32-exact", "fp32", "bf16"]),
        *itertools.product(["toy:wide_normed"], ["every"], ["fp32", "bf16"]),
    ],
)
def test_nothing_of_a_round_is_left_for_the_next(name, form, precision, monkeypatch):
    """Captured with stale memory, replayed after other clients, with momentum and weights of all kinds left."""
    count_as_large(monkeypatch)
    bf16 = precision == "bf16"
    with torch_settings(CUDA, precision):
        made = world(name, "stacked", CUDA)
        module = build(name, straight_line.CLASSES, seed=5, image_size=straight_line.SIZES.get(name, 8))
        kernels = ops(CUDA, exact=precision == "fp32-exact", bf16=bf16, form=FORMS[form]._replace(untransposed=True))
        trainer = StackedTrainer(module, made.layout, made.data, made.transform, kernels)
        work = made.work(clients(9), wants_losses=True)
        first = trainer.train(made.starts, work)
        for stale in (torch.nan, -torch.inf, -0.0, 3.0):
            left = [trainer._buffers.w, trainer._buffers.v, trainer._buffers.state]
            left += [copy for copies in trainer.net._copies.values() for copy in copies if copy is not None]
            assert len(left) > 3
            for tensor in left:
                tensor.fill_(stale)
            trainer.train(made.starts, made.work(clients(5)))
            again = trainer.train(made.starts, work)
            assert torch.equal(again.models.view(torch.int32), first.models.view(torch.int32)), stale
            assert torch.equal(again.losses, first.losses), stale
        assert first.models.isfinite().all()


@pytest.mark.parametrize("bf16", [False, True], ids=["TF32", "bf16"])
def test_vgg_models_begin_a_round(bf16):
    """Weights and all copies of them in one pass, in the order and the rounding that torch gives."""
    model = build("vgg11", 10, seed=0, image_size=32)
    layout = FlatLayout(model, channels_last=True)
    net = WideNet(wide_blocks(model, 32), layout, ops(CUDA, bf16=bf16, form=form_for(CUDA)))
    if not net.updates:
        pytest.skip("the form of this GPU keeps no copies")
    starts = torch.randn(3, layout.parameter_width, device=CUDA)
    w, v = (torch.full((8, layout.parameter_width + 32), torch.nan, device=CUDA)[:, :-32] for _ in range(2))
    rows = torch.tensor([2, 0, 2, 1, 1, 0, 2], dtype=torch.int32, device=CUDA)
    net.reserve(w)
    net.begin(starts, rows, w[:7], v)
    assert torch.equal(w[:7], starts[rows])
    assert w[7].isnan().all()
    kept = 0
    for i, copies in net._copies.items():
        weight = net._weight(starts[rows], net.blocks.convolutions[i])
        for made, order in zip(copies, ((0, 1, 2, 3), (0, 2, 3, 1)), strict=True):
            if made is not None:
                assert torch.equal(made[:7], weight.permute(order).to(made.dtype))
                kept += 1
        slot = next(s for s in layout.parameters if s.name == net.blocks.convolutions[i].weight)
        v[:, slot.offset : slot.offset + slot.size] = 0.0
    assert kept == 6
    assert not v.any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_same_bits_in_every_form(precision, monkeypatch):
    """Of VGG-11, whose layers are large: 5 clients alone and 35 take other tiles."""
    monkeypatch.setattr(triton_room, "form_for", lambda device: FORMS["every"])
    data = toy.images(samples=600, size=32, classes=10)
    common = SHORT | {"model": "vgg11", "precision": precision, "batch_size": 64}
    config = toy.config(**common, algorithm="scaffold")
    alone = toy.run([config], data, device="cuda")[0]
    assert all(value.isfinite().all() for value in alone.model.values())
    for size in STACKS["vgg11"]:
        beside = others(size - 1, common)
        place = size // 2
        stack = [*beside[:place], config, *beside[place:]]
        assert_same_bits(alone, toy.run(stack, data, device="cuda")[place], f"{size} runs")


@pytest.mark.parametrize(
    ("name", "exact"), [("lenet5", True), ("toy:wide", True), ("lenet5", False), ("toy:wide", False), ("vgg11", False)]
)
def test_same_losses_of_candidates_whoever_else_is_asked(name, exact):
    with torch_settings(CUDA, "fp32"):
        made = world(name, "stacked", CUDA, exact=exact)
        own = np.arange(11)
        alone = made.trainer.mean_losses(made.starts, [1], [own]).read()
        for extra in ([np.arange(40, 45)], [np.arange(30, 70), np.arange(3)], [np.arange(60)] * 9):
            rows = [1, *(i % len(made.starts) for i in range(len(extra)))]
            assert made.trainer.mean_losses(made.starts, rows, [own, *extra]).read()[0] == alone[0]


def forget_kernels():
    """What this process has compiled or read from Triton's cache, as if it had just started."""
    from triton.runtime.jit import JITFunction

    names = [module.name for module in pkgutil.iter_modules(triton_room.__path__)]
    for name in names:
        for value in vars(importlib.import_module(f"{triton_room.__name__}.{name}")).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["lenet5", "vgg11"])
def test_first_rounds_find_their_kernels_compiled(model, precision, monkeypatch):
    """Every variant that training and evaluation launch, and no other, is asked for ahead; bits are those of kernels
    that are compiled when they are launched."""
    triton = pytest.importorskip("triton")
    asked = {True: set(), False: set()}  # by whether ahead

    def note(*, key, fn, is_manual_warmup, **rest):
        asked[is_manual_warmup].add((fn.module.rsplit(".", 1)[1], fn.name, key))

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    data = toy.images(samples=600, size=32, classes=10)
    common = SHORT | {"model": model, "precision": precision, "batch_size": 64}
    config = toy.config(**common, algorithm="scaffold", stragglers=0.5)
    forget_kernels()
    ready = toy.run([config], data, device="cuda")[0]
    ahead, late = asked[True].copy(), asked[False].copy()
    assert {name for _, name, _ in late} <= {"blend_kernel"}  # averages models after the round
    for seen in asked.values():
        seen.clear()
    forget_kernels()
    monkeypatch.setattr("fedentopt.simulation.trainers.stacked.compile_ahead", lambda rehearse: None)
    one_by_one = toy.run([config], data, device="cuda")[0]
    assert not asked[True]
    assert asked[False] - late == ahead
    assert len(ahead) >= 20
    assert_same_bits(ready, one_by_one, "compiled one by one")


FUSED = {
    "norms": FusedForm(norms=True),
    "depthwise": FusedForm(depthwise=True),
    "both": FusedForm(norms=True, depthwise=True),
}


def channels_last(*shape, dtype=torch.float32, shift=0.0):
    drawn = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=drawn, dtype=torch.float64) * 2 + shift
    return x.to(CUDA, dtype).contiguous(memory_format=torch.channels_last)


def gate(means):
    """In the place of squeeze-and-excitation's two layers, without parameters."""
    wide = means.to(torch.promote_types(means.dtype, torch.float32))
    return (wide - wide.mean(1, keepdim=True)).sigmoid().to(means.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "side", "stride"),
    [((64, 96, 30, 31), 3, 2), ((9, 40, 28, 28), 5, 1), ((16, 1152, 7, 7), 5, 1), ((5, 15, 9, 10), 3, 1),
     ((7, 672, 14, 14), 5, 2), ((12, 7, 1, 1), 3, 1)],
    ids=str,
)  # fmt: skip
def test_fused_layers(shape, side, stride, dtype):
    """Against float64 on the real samples, and the same bits twice.

    Filters on one pixel have next to no gradient, since BatchNorm undoes their factor: Σ x g cancels to eps / var of
    its terms, and what is left of them in float32 or bf16 is rounding. So to the error that is allowed of a filter's
    gradient comes that of its terms, each off by up to 32 roundings u on its way here, independently of the others:
    32 u sqrt(Σ (x g)²). Where nothing cancels that root is the gradient's own size, and this adds next to nothing.
    """
    torch.manual_seed(0)
    channels, real = shape[1], max(2, shape[0] * 2 // 3)
    near = 2e-5 if dtype == torch.float32 else 3e-2
    mask = torch.arange(shape[0], device=CUDA) < real
    conv = torch.nn.Conv2d(channels, channels, side, stride, side // 2, groups=channels, bias=False).to(CUDA)
    norm = torch.nn.BatchNorm2d(channels).to(CUDA)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    exact = torch.nn.Sequential(conv, norm, torch.nn.SiLU())
    exact = torch.nn.Sequential(*[copy.deepcopy(layer).double() for layer in exact])
    x = channels_last(*shape, dtype=dtype, shift=3.0)
    wide = x[:real].double().requires_grad_()
    with without_cudnn():
        convolved = exact[0](wide)
        convolved.retain_grad()
        a = exact[1:](convolved)
        expected = a * gate(a.mean((2, 3), keepdim=True))
        push = channels_last(*shape[:2], *a.shape[2:], dtype=dtype)
        push[real:] = 0
        expected.backward(push[:real].double())
        terms = torch.nn.grad.conv2d_weight(
            wide.detach() ** 2, conv.weight.shape, convolved.grad**2, stride, side // 2, groups=channels
        )
    rounding = 32 * torch.finfo(dtype).eps / 2 * float(terms.sum().sqrt())
    bits = []
    for _ in range(2):
        mine = [copy.deepcopy(layer) for layer in (conv, norm)]
        given = x.clone().requires_grad_()
        y = fused_layers.excite(mine[1], fused_convolutions.depthwise(mine[0], given), mask, "silu", gate)
        y.backward(push)
        found = [y[:real], given.grad[:real], mine[0].weight.grad, mine[1].weight.grad, mine[1].bias.grad,
                 mine[1].running_mean, mine[1].running_var]  # fmt: skip
        assert not given.grad[real:].any()
        bits.append([t.detach().clone() for t in found])
    for first, second in zip(*bits, strict=True):
        assert torch.equal(first, second)
    wanted = [expected, wide.grad, exact[0].weight.grad, exact[1].weight.grad, exact[1].bias.grad,
              exact[1].running_mean, exact[1].running_var]  # fmt: skip
    for i, (value, its) in enumerate(zip(bits[0], wanted, strict=True)):
        gap, scale = (float(t.detach().norm()) for t in (value.double() - its, its))
        print(f"{shape} {dtype} {i}: difference {gap:.1e} of {scale:.1e}")
        assert gap < near * max(scale, 1e-3) + (rounding if i == 2 else 0), i


@pytest.mark.parametrize(
    ("name", "size", "near", "form", "parts"),
    [
        ("toy:normed", 8, 1e-4, "both", {"norms"}),
        ("efficientnet-b0", 64, 5e-2, "norms", {"norms"}),
        ("efficientnet-b0", 64, 5e-2, "depthwise", {"depthwise"}),
        ("efficientnet-b0", 64, 5e-2, "both", {"norms", "depthwise"}),
        ("efficientnet-lite0", 64, 3e-1, "both", {"norms"}),
        ("vgg11-bn", 32, 3e-1, "both", {"norms"}),
    ],
)
def test_fused_steps_train_as_plain_ones(name, size, near, form, parts):
    with torch_settings(CUDA, "fp32-exact"):
        (padded, _), starts, work = both_ways(name, size, 20, "fp32-exact", FusedForm(), lr=1e-5, mu=0.0)
        fused = StreamsTrainer(
            padded.model, padded.layout, padded.data, padded.transform, padded.kernels, 3, "fp32-exact",
            form=FUSED[form],
        )  # fmt: skip
        expected = padded.train(starts, work)
        few = torch.from_numpy(work.sizes >= 5).to(CUDA)
        for _ in range(2):  # captured, replayed
            found = fused.train(starts, work)
            torch.testing.assert_close(found.losses, expected.losses, atol=near, rtol=near)
            for mine, its in zip(*(moved(fused.layout, t.models[few], starts) for t in (found, expected)), strict=True):
                gap = (mine - its).norm(dim=1) / its.norm(dim=1)
                print(f"{name} {form}: relative difference of a movement {float(gap.max()):.1e}")
                assert float(gap.max()) < near
        assert not padded.fused
        assert set(fused.fused.values()) == parts
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            fused.train(starts, work)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_fused_steps_under_bf16_are_as_near_as_plain_ones():
    """To exact float32: what bf16 rounds away is the same share of a movement, within half of it."""
    with torch_settings(CUDA, "fp32-exact"):
        (exact, _), starts, work = both_ways("efficientnet-b0", 64, 20, "fp32-exact", FusedForm(), lr=1e-5, mu=0.0)
        wanted = moved(exact.layout, exact.train(starts, work).models, starts)[0]
    gaps = {}
    with torch_settings(CUDA, "bf16"):
        for form in (FusedForm(), *FUSED.values()):
            trainer = StreamsTrainer(
                exact.model, exact.layout, exact.data, exact.transform, ops(CUDA, bf16=True), 3, "bf16", form=form
            )
            found = moved(exact.layout, trainer.train(starts, work).models, starts)[0]
            gaps[form] = float((found - wanted).norm() / wanted.norm())
            trainer.close()
    print(gaps)
    assert all(gap < 1.5 * gaps[FusedForm()] for gap in gaps.values())


@pytest.mark.parametrize(
    ("name", "size", "precision"),
    [
        ("toy:normed", 8, "fp32"),
        ("efficientnet-b0", 64, "fp32"),
        ("efficientnet-b0", 64, "bf16"),
        ("efficientnet-lite0", 64, "fp32"),
        ("vgg11-bn", 32, "fp32"),
    ],
)
def test_same_bits_of_models_with_fused_layers(name, size, precision):
    """From round to round, and in another trainer with fewer clients side by side."""
    with torch_settings(CUDA, precision):
        (made, _), starts, work = both_ways(name, size, 20, precision)
        other = StreamsTrainer(
            made.model, made.layout, made.data, made.transform, made.kernels, 2, precision, masks=made.masks
        )
        assert made.fused
        assert made.masks
        found = [trainer.train(starts, work) for trainer in (made, made, other)]
        for again in found[1:]:
            assert_equal_bits(again.models, found[0].models)
            assert_equal_bits(again.losses, found[0].losses)
        images = made.data.images[:50]
        assert_equal_bits(*(trainer.predict(found[0].models[:2], images) for trainer in (made, other)))


def assert_equal_bits(mine, its):
    """Also where they are no numbers."""
    whole = {4: torch.int32, 8: torch.int64}[mine.element_size()]
    assert torch.equal(mine.view(whole), its.view(whole))
