"""Clean training loops to be run once, when the guard is finished. Do not look at their runs before: the guard must
not be tuned to them.

    python -m benchmarks.experiments.clean --held-back
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.experiments.training import Samples, Training, loader_of
from benchmarks.experiments.workloads import BATCH, BATCHES, adam, inputs, labels, mlp, supervised

SEEDS = (30_011, 30_013)
"""frozen, and not among those of the other kinds"""


def numbers() -> Samples:
    """Return one number a batch, for loops that make their own data."""
    return Samples(torch.arange(BATCHES))


class CartPoles(nn.Module):
    """Independent poles on carts, pushed left or right. Its buffer is the state, so that a rollback restores it."""

    state: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("state", 0.05 * torch.randn(count, 4))

    def push(self, move: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state after 0.02 s and which poles fell. Those begin again at a random state."""
        _, speed, angle, spin = self.state.unbind(1)
        force = 20.0 * move - 10.0
        pull = (force + 0.05 * spin.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        change = torch.stack([speed, pull - 0.05 * turn * angle.cos() / 1.1, spin, turn], 1)
        after = self.state + 0.02 * change
        fell = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21) | (torch.rand(len(after)) < 0.002)
        self.state.copy_(torch.where(fell[:, None], 0.05 * torch.randn_like(after), after))
        return after, fell.float()


def actor_critic(seed: int) -> Training:
    """Advantage actor-critic on 16 poles, 8 moves a step. The value loss grows while the policy improves."""
    model, poles, loader = mlp(4, 64, 64, 3), CartPoles(16), loader_of(numbers(), 1)

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        seen, moves, falls = [], [], []
        with torch.no_grad():
            for _ in range(8):
                seen.append(poles.state.clone())
                moves.append(torch.multinomial(model(seen[-1])[:, :2].softmax(1), 1)[:, 0])
                falls.append(poles.push(moves[-1])[1])
            value = model(poles.state)[:, 2]
            returns = []
            for fell in reversed(falls):
                value = 1.0 + 0.98 * (1 - fell) * value
                returns.insert(0, value)
        out = model(torch.cat(seen))
        log_share, values, wanted = functional.log_softmax(out[:, :2], 1), out[:, 2], torch.cat(returns)
        gain = (log_share.gather(1, torch.cat(moves)[:, None])[:, 0] * (wanted - values.detach())).mean()
        entropy = -(log_share.exp() * log_share).sum(1).mean()
        return 0.5 * functional.mse_loss(values, wanted) - gain - 0.01 * entropy

    return Training(model, [adam(model)], loader, loss, clip=0.5, registered={"poles": poles})


class Replay(nn.Module):
    """The last transitions, eight of them a step, in a buffer that a rollback restores."""

    rows: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(size, 10))

    def store(self, number: int, *columns: Tensor) -> Tensor:
        """Store the transitions of a step and return a random batch of all."""
        size, count = len(self.rows), len(columns[0])
        first = (number - 1) * count
        self.rows[torch.arange(first, first + count) % size] = torch.cat(columns, 1)
        return self.rows[torch.randint(min(size, first + count), (BATCH,))]


def dqn_indexed(seed: int) -> Training:
    """Q-learning on poles that move inside the loss function. The target network is copied every 250 steps."""
    q, poles, replay = mlp(4, 64, 64, 2), CartPoles(8), Replay(8000)
    target = copy.deepcopy(q).requires_grad_(False)

    def before_step(number: int) -> None:
        if number % 250 == 0:
            target.load_state_dict(q.state_dict())

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            seen = poles.state.clone()
            explores = torch.rand(8) < max(0.05, 1 - number / 1500)
            move = torch.where(explores, torch.randint(2, (8,)), q(seen).argmax(1))
            after, fell = poles.push(move)
            rows = replay.store(number, seen, after, move[:, None].float(), fell[:, None])
            seen, after, (move, fell) = rows[:, :4], rows[:, 4:8], rows[:, 8:].unbind(1)
            wanted = 1.0 + 0.99 * (1 - fell) * target(after).amax(1)
        return functional.mse_loss(q(seen).gather(1, move[:, None].long())[:, 0], wanted)

    registered = {"target": target, "poles": poles, "replay": replay}
    return Training(q, [adam(q)], loader_of(numbers(), 1), loss, before_step=before_step, registered=registered)


def diffusion(seed: int) -> Training:
    """Denoising at random timesteps. The error is weighted by the signal-to-noise ratio, at least 1."""
    model, total = mlp(10, 64, 64, 2), BATCHES * BATCH
    turn = 3 * math.pi * (0.3 + 0.7 * torch.rand(total))
    x = torch.stack([turn * turn.cos(), turn * turn.sin()], 1) / 6 + 0.05 * torch.randn(total, 2)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.04, 200), 0)
    waves = torch.arange(1, 5) * math.pi / 200

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        (x,) = batch
        time = torch.randint(200, (len(x), 1))
        share = kept[time]
        noisy = share.sqrt() * x + (1 - share).sqrt() * torch.randn_like(x)
        guess = model(torch.cat([noisy, (time * waves).sin(), (time * waves).cos()], 1))
        return ((share / (1 - share)).clamp(min=1) * (guess - x).square()).mean()

    return supervised(model, Samples(x), loss)


def unfreezing(seed: int) -> Training:
    """The head trains first. Steps 1,000, 2,000 and 3,000 each add the next deeper layer to the optimizer."""
    layers = [nn.Sequential(nn.Linear(width, 64), nn.LayerNorm(64), nn.ReLU()) for width in (16, 64, 64)]
    model, x = nn.Sequential(*layers, nn.Linear(64, 8)), inputs()
    optimizer = adam(model[3], 3e-3)

    def before_step(number: int) -> None:
        for depth, layer in enumerate(reversed(layers), 1):
            layer.requires_grad_(number >= 1000 * depth)
            # After a rollback the optimizer may still have the group.
            if number >= 1000 * depth and len(optimizer.param_groups) == depth:
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 3e-3 / 2**depth})

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    before_step(1)
    loader = loader_of(Samples(x, labels(x, 8, 0.5)), BATCH)
    return Training(model, [optimizer], loader, loss, before_step=before_step)


def loss_switch(seed: int) -> Training:
    """The squared error of the probabilities until step 2,000, then cross-entropy with smoothed labels."""
    model, x = mlp(16, 64, 64, 10), inputs()

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        scores, y = model(batch[0]), batch[1]
        if number <= 2000:
            return functional.mse_loss(scores.softmax(1), functional.one_hot(y, 10).float())
        return functional.cross_entropy(scores, y, label_smoothing=0.1)

    return supervised(model, Samples(x, labels(x, 10, 0.5)), loss)


def heavy_tails(seed: int) -> Training:
    """Squared error with batches of 4. The noise of the targets has infinite variance."""
    model, x = mlp(8, 32, 1), torch.randn(BATCHES * 4, 8)
    y = torch.tanh(x @ torch.randn(8)) + 0.3 * torch.distributions.StudentT(1.8).sample((len(x),))

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        return functional.mse_loss(model(batch[0])[:, 0], batch[1])

    return Training(model, [adam(model)], loader_of(Samples(x, y), 4), loss)


class NextSymbol(nn.Module):
    """A recurrent network over 16 symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(16, 24), nn.GRU(24, 48, batch_first=True), nn.Linear(48, 16)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(symbols))[0])


def summed_lengths(seed: int) -> Training:
    """Sequences of 4 to 96 symbols, one length a batch. The loss is the sum over symbols, not the mean."""
    model, total = NextSymbol(), BATCHES * 8
    follows, rows = torch.randperm(16), [torch.randint(16, (total,))]
    for _ in range(96):
        rows.append(torch.where(torch.rand(total) < 0.7, follows[rows[-1]], torch.randint(16, (total,))))
    lengths = (4 * 24 ** torch.rand(BATCHES)).long().repeat_interleave(8)

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        length = int(batch[1][0])
        symbols = batch[0][:, : length + 1].long()
        scores = model(symbols[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), symbols[:, 1:].flatten(), reduction="sum")

    loader = loader_of(Samples(torch.stack(rows, 1).to(torch.uint8), lengths), 8)
    return Training(model, [adam(model)], loader, loss, clip=50.0)


def adversarial(seed: int) -> Training:
    """From step 1,500 on, three steps of projected gradient ascent move the inputs before each update."""
    model, x = mlp(16, 64, 64, 4), inputs()

    def attack(x: Tensor, y: Tensor) -> Tensor:
        moved = x + 0.25 * (2 * torch.rand_like(x) - 1)
        for _ in range(3):
            moved.requires_grad_(True)
            (slope,) = torch.autograd.grad(functional.cross_entropy(model(moved), y), moved)
            moved = (x + (moved.detach() + 0.12 * slope.sign() - x).clamp(-0.25, 0.25)).detach()
        return moved

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        x, y = batch
        return functional.cross_entropy(model(x if number < 1500 else attack(x, y)), y)

    return supervised(model, Samples(x, labels(x, 4, 0.3)), loss)


def blocks(seed: int) -> Training:
    """Blocks of 150 batches, easy and hard in turn: the hard ones have larger inputs and noisy labels."""
    model, x = mlp(16, 64, 64, 6), inputs()
    hard = (torch.arange(BATCHES) // 150 % 2 == 1).repeat_interleave(BATCH)
    scores = x @ torch.randn(16, 6)
    y = (scores + torch.where(hard, 8.0, 0.2)[:, None] * torch.randn_like(scores)).argmax(1)
    x = torch.where(hard[:, None], 1.5 * x, x)

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return supervised(model, Samples(x, y), loss)


def wgan(seed: int) -> Training:
    """A critic whose weights are clamped, and a generator at every sixth step. Both losses are signed."""
    generator, critic = mlp(8, 64, 64, 2), mlp(2, 64, 64, 1)
    angle = 2 * math.pi * torch.rand(BATCHES * BATCH)
    real = 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(len(angle), 2)
    optimizers = [torch.optim.RMSprop(m.parameters(), lr=5e-4) for m in (generator, critic)]

    def before_step(number: int) -> None:
        critic.requires_grad_(number % 6 != 0)
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.1, 0.1)

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        fake = generator(torch.randn(BATCH, 8))
        if number % 6 == 0:
            return -critic(fake).mean()
        return critic(fake.detach()).mean() - critic(batch[0]).mean()

    models: dict[str, nn.Module] = {"generator": generator, "critic": critic}
    return Training(models, optimizers, loader_of(Samples(real), BATCH), loss, before_step=before_step)


KINDS: dict[str, Callable[[int], Training]] = {
    kind.__name__: kind
    for kind in (
        actor_critic, dqn_indexed, diffusion, unfreezing, loss_switch, heavy_tails, summed_lengths, adversarial, blocks,
        wgan,
    )
}  # fmt: skip
