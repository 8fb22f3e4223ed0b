"""Clean training loops of many kinds. No fault is injected: whatever the loss does is what the run is meant to do."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.experiments.training import Samples, Training, loader_of

BATCHES = 4400
"""in a pass over the data: some more than the steps"""
BATCH = 32


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def inputs(width: int = 16, batches: int = BATCHES) -> Tensor:
    return torch.randn(batches * BATCH, width)


def labels(x: Tensor, classes: int, noise: float) -> Tensor:
    """Return the classes that a random linear map with noisy scores assigns."""
    scores = x @ torch.randn(x.shape[1], classes)
    return (scores + noise * torch.randn_like(scores)).argmax(1)


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def supervised(model: nn.Module, samples: Samples, loss: Callable[[int, tuple[Tensor, ...]], Tensor]) -> Training:
    return Training(model, [adam(model)], loader_of(samples, BATCH), loss)


def multi_task(seed: int, share: float = 0.03) -> Training:
    """A second task makes up a small share of the batches. It has a head of its own and a higher loss."""
    model = nn.ModuleDict({"trunk": mlp(16, 64, 64), "a": nn.Linear(64, 4), "b": nn.Linear(64, 50)})
    x = inputs()
    task = (torch.rand(BATCHES) < share).repeat_interleave(BATCH)
    y = torch.where(task, labels(x, 50, 6.0), labels(x, 4, 0.5))

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        x, y, task = batch
        return functional.cross_entropy(model["b" if task[0] else "a"](model["trunk"](x).relu()), y)

    return supervised(model, Samples(x, y, task), loss)


def multi_task_5(seed: int) -> Training:
    return multi_task(seed, 0.05)


def _gan(alternating: bool) -> Training:
    generator, critic = mlp(8, 64, 64, 2), mlp(2, 64, 64, 1)
    angle = torch.randint(8, (BATCHES * BATCH,)) * (math.pi / 4)
    real = 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(len(angle), 2)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (generator, critic)]

    def score(x: Tensor, is_real: float) -> Tensor:
        scores = critic(x)
        return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, is_real))

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        fake = generator(torch.randn(BATCH, 8))
        critic_loss = score(batch[0], 1.0) + score(fake.detach(), 0.0)
        critic.requires_grad_(False)
        generator_loss = score(fake, 1.0)
        critic.requires_grad_(True)
        if alternating:
            return critic_loss if number % 2 else generator_loss
        return critic_loss + generator_loss

    models: dict[str, nn.Module] = {"generator": generator, "critic": critic}
    return Training(models, optimizers, loader_of(Samples(real), BATCH), loss)


def gan(seed: int) -> Training:
    """Both networks are updated in every step, from the sum of their losses."""
    return _gan(alternating=False)


def gan_alternating(seed: int) -> Training:
    """Odd steps update the critic, even steps the generator: the other optimizer's parameters have no gradient."""
    return _gan(alternating=True)


class ChainReplay:
    """A stream of replayed transitions of a chain: the reward is at its far end. The network itself chooses the moves."""

    LENGTH = 12

    def __init__(self, q: nn.Module, seed: int) -> None:
        self._q, self._seed = q, seed

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rng, place, drawn = random.Random(self._seed), 0, 0
        replay: list[tuple[int, int, float, int, float]] = []
        seen = torch.eye(self.LENGTH)
        while True:
            drawn += 1
            for _ in range(4):
                explore = rng.random() < max(0.1, 1 - drawn / 1000)
                with torch.no_grad():
                    move = rng.randrange(2) if explore else int(self._q(seen[place]).argmax())
                after = min(self.LENGTH - 1, place + 1) if move else max(0, place - 1)
                done = after == self.LENGTH - 1 or rng.random() < 0.02
                replay.append((place, move, 10.0 * (after == self.LENGTH - 1), after, float(done)))
                place = 0 if done else after
            del replay[:-5000]
            state, move, reward, after, done = zip(*rng.choices(replay, k=BATCH), strict=True)
            yield seen[list(state)], torch.tensor(move), torch.tensor(reward), seen[list(after)], torch.tensor(done)


def dqn(seed: int) -> Training:
    """Q-learning with replay and a target network that is copied every 200 steps."""
    q = mlp(ChainReplay.LENGTH, 64, 64, 2)
    target = copy.deepcopy(q).requires_grad_(False)

    def before_step(number: int) -> None:
        if number % 200 == 0:
            target.load_state_dict(q.state_dict())

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        state, move, reward, after, done = batch
        with torch.no_grad():
            wanted = reward + 0.97 * (1 - done) * target(after).amax(1)
        return functional.mse_loss(q(state).gather(1, move[:, None])[:, 0], wanted)

    return Training(q, [adam(q)], ChainReplay(q, seed), loss, before_step=before_step, registered={"target": target})


def policy_gradient(seed: int) -> Training:
    """REINFORCE on contexts. Rewards have infinite variance."""
    policy, x = mlp(16, 64, 64, 5), inputs()
    noise = torch.distributions.StudentT(1.5)

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        x, best = batch
        chosen = torch.distributions.Categorical(logits=policy(x))
        move = chosen.sample()
        reward = (move == best).float() + 0.3 * noise.sample((len(x),))
        return -(chosen.log_prob(move) * reward).mean()

    return supervised(policy, Samples(x, labels(x, 5, 0.5)), loss)


def vae(seed: int) -> Training:
    """The weight of the KL term rises from 0 to 1 between steps 600 and 2,400."""
    encoder, decoder = mlp(32, 64, 64, 16), mlp(8, 64, 64, 32)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    x = torch.tanh(inputs(4) @ torch.randn(4, 32)) + 0.1 * torch.randn(BATCHES * BATCH, 32)

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        (x,) = batch
        mean, log_var = encoder(x).chunk(2, 1)
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        drawn = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        error = (decoder(drawn) - x).square().sum(1).mean()
        return error / (2 * 0.05) + min(1.0, max(0.0, (number - 600) / 1800)) * kl

    return supervised(model, Samples(x), loss)


def triplet(seed: int) -> Training:
    """Anchor, positive and negative of overlapping clusters: the loss of some batches is near zero."""
    model, total = mlp(16, 64, 8), BATCHES * BATCH
    centers = 0.7 * torch.randn(10, 16)
    one = torch.randint(10, (total,))
    other = (one + torch.randint(1, 10, (total,))) % 10
    rows = [centers[c] + torch.randn(total, 16) for c in (one, one, other)]

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        anchor, positive, negative = (functional.normalize(model(x), dim=1) for x in batch)
        return functional.triplet_margin_loss(anchor, positive, negative, margin=0.3)

    return supervised(model, Samples(*rows), loss)


def moe(seed: int) -> Training:
    """Four experts, one a sample, and an auxiliary loss that balances them."""
    experts = nn.ModuleList(mlp(16, 32, 8) for _ in range(4))
    model = nn.ModuleDict({"gate": nn.Linear(16, 4), "experts": experts})
    x = inputs()

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        x, y = batch
        share = model["gate"](x).softmax(1)
        top, chosen = share.max(1)
        scores = torch.stack([expert(x) for expert in experts], 1)[torch.arange(len(x)), chosen]
        load = functional.one_hot(chosen, 4).float().mean(0)
        return functional.cross_entropy(top[:, None] * scores, y) + 0.05 * 4 * (load * share.mean(0)).sum()

    return supervised(model, Samples(x, labels(x, 8, 0.5)), loss)


def curriculum(seed: int) -> Training:
    """Four stages of 1,000 steps. Each is harder than the one before, and the loss rises with it."""
    model, x = mlp(4, 64, 64, 1), inputs(4)
    harder = torch.tensor([0.5, 1.0, 2.0, 4.0, 4.0]).repeat_interleave(1000 * BATCH)[: len(x)]
    y = torch.sin(harder * (x @ torch.randn(4))) * harder + 0.1 * torch.randn(len(x))

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        return functional.mse_loss(model(batch[0])[:, 0], batch[1])

    return supervised(model, Samples(x, y), loss)


def continual(seed: int) -> Training:
    """Fine-tuning on a new task every 400 steps: the loss jumps above its untrained level at each change."""
    model, x = mlp(16, 64, 64, 8), inputs()
    y = torch.cat([labels(part, 8, 0.5) for part in x.split(400 * BATCH)])

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return supervised(model, Samples(x, y), loss)


def rlhf(seed: int) -> Training:
    """PPO on sampled answers: a clipped ratio to the policy of up to four steps ago and a KL penalty. The loss is signed."""
    policy, reward_model, x = mlp(16, 64, 64, 20), mlp(36, 32, 1).requires_grad_(False), inputs()
    old, reference = (copy.deepcopy(policy).requires_grad_(False) for _ in range(2))

    def before_step(number: int) -> None:
        if number % 4 == 1:
            old.load_state_dict(policy.state_dict())

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        (x,) = batch
        new, sampled_from = functional.log_softmax(policy(x), 1), functional.log_softmax(old(x), 1)
        answer = torch.multinomial(sampled_from.exp(), 1)
        advantage = 5 * reward_model(torch.cat([x, functional.one_hot(answer[:, 0], 20).float()], 1))
        ratio = (new - sampled_from).gather(1, answer).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        kl = (new.exp() * (new - functional.log_softmax(reference(x), 1))).sum(1).mean()
        return 0.02 * kl - gain

    training = supervised(policy, Samples(x), loss)
    training.clip, training.before_step, training.registered = 1.0, before_step, {"old": old}
    return training


def lazy_penalty(seed: int) -> Training:
    """Every 16th step adds 16 times a penalty on the gradient with respect to the inputs."""
    model, x = mlp(16, 64, 64, 4), inputs()

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        x, y = batch[0].requires_grad_(number % 16 == 0), batch[1]
        error = functional.cross_entropy(model(x), y)
        if number % 16:
            return error
        (slope,) = torch.autograd.grad(error * BATCH, x, create_graph=True)
        return error + 16 * slope.square().sum(1).mean()

    return supervised(model, Samples(x, labels(x, 4, 0.5)), loss)


def warm_restarts(seed: int) -> Training:
    """The loop sets the LR by hand: a cosine from 1e-2 to 0 that restarts every 500 steps."""
    model, x = mlp(16, 64, 64, 8), inputs()

    def loss(number: int, batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    training = supervised(model, Samples(x, labels(x, 8, 1.0)), loss)

    def before_step(number: int) -> None:
        for group in training.optimizers[0].param_groups:
            group["lr"] = 5e-3 * (1 + math.cos(math.pi * ((number - 1) % 500) / 500))

    training.before_step = before_step
    return training


KINDS: dict[str, Callable[[int], Training]] = {
    kind.__name__: kind
    for kind in (
        multi_task, multi_task_5, gan, dqn, policy_gradient, vae, triplet, moe, curriculum, continual, rlhf,
        gan_alternating, lazy_penalty, warm_restarts,
    )
}  # fmt: skip


def build(kind: str, seed: int, kinds: Mapping[str, Callable[[int], Training]] = KINDS) -> Training:
    """Return a new training loop; the same bits for the same seed."""
    torch.manual_seed(seed)
    return kinds[kind](seed)
