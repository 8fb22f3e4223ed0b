"""Text formats that a description of a few lines is enough for. The generic reader does the rest.

An installed package adds its own with the entry point group `holdfast.formats`; each entry point is a LogDescription.
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points

from holdfast.diagnosis.importers.reading.described_line import GENERIC, LogDescription

logger = logging.getLogger("holdfast")
_N = r"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)"
_DESCRIPTIONS = (
    LogDescription(
        name="espnet",
        description="ESPnet: `1epoch:train:1-100batch: iter_time=..., loss=...`",
        record=r"\b(?P<epoch>\d+)epoch:train:\d+-(?P<step>\d+)batch:",
        evaluation=r"\bepoch results: .*\[(?P<name>valid)\]",
        columns={"optim0_lr0": "lr", "train_time": "seconds"},
    ),
    LogDescription(
        name="darknet",
        description="Darknet: `100: 2.345, 3.456 avg loss, 0.001 rate, 3.2 seconds, 6400 images`",
        record=r"^\s*(?P<step>\d+): (?P<loss>" + _N + "), (?P<mean_loss>" + _N + ") avg(?: loss)?, (?P<lr>" + _N
        + ") rate, (?P<seconds>" + _N + ") seconds",
        counts_within_epoch=False,
    ),
    LogDescription(
        "wenet", "WeNet: `TRAIN Batch 0/100 loss 5.1 loss_att 4.1 lr ...`, epoch and batch; `CV Batch` is held-out data",
        record=r"\bTRAIN Batch (?P<epoch>\d+)/(?P<step>\d+) loss (?P<loss>" + _N + ")", evaluation=r"\b(?P<name>CV) Batch",
    ),
    # The generic reader reads the rest. Only their names, columns and averages are known here.
    LogDescription(
        "megatron", "Megatron-LM, Megatron-DeepSpeed: `iteration N/ M | ... | lm loss: ... |`",
        r"\biteration\s+\d+/\s*\d+ \|", columns={"per iteration": "seconds"}, counts_within_epoch=False,
        averaged="the steps since the record before",
    ),
    LogDescription(
        "hf_console", "Hugging Face Trainer console, or W&B's output.log of it: {'loss': ..., 'epoch': ...}",
        r"\{'loss': ", counts_within_epoch=False, first_step=1,
    ),
    LogDescription(
        "fairseq", "fairseq's console: `epoch 001: ... loss=..., num_updates=...`, `| epoch 001 | loss ... |`, JSON",
        r"num_updates", counts_within_epoch=False, averaged="the steps since the record before, or of the epoch so far",
    ),
    LogDescription(
        "torchtitan", "torchtitan's console: `step: N  loss: ...  grad_norm: ...  memory: ...  tps: ...`",
        r"\bstep:\s*\d+\s+loss:\s+\S+\s+(?:grad_norm|memory|tps|gnorm):", columns={"memory": "memory_reserved"},
        counts_within_epoch=False,
    ),
    LogDescription(
        "kempnerforge", "KempnerForge's console: `[step N] loss=... | lr=... | grad_norm=... | ...`",
        r"\[step\s+\d+\] \w+=\S+ \|", columns={"mem": "memory_peak"}, counts_within_epoch=False,
    ),
    LogDescription(
        "olmo", "OLMo's console: `[step=N/M]`, then one metric on each line", r"\[step=\d+/\d+",
        columns={"optim/learning_rate_group0": "lr"}, counts_within_epoch=False,
    ),
    LogDescription(
        "detectron2_text", "detectron2's console: `eta: ...  iter: N  total_loss: ...`", r"\biter: \d+\s+total_loss: ",
        columns={"time": "seconds"}, counts_within_epoch=False, averaged="the last 20 steps (a median)",
    ),
    LogDescription(
        "mmengine_text", "mmengine, mmcv: `Epoch(train) [1][50/7330]  lr: ...  loss: ...`, `Iter [50/80000]`",
        r"(?:Epoch|Iter)(?:\(train\))?\s*\[ *\d+(?:\]\[ *\d+)?/\d+\]\s+", columns={"time": "seconds"},
    ),
    LogDescription(
        "sockeye", "Sockeye: `Checkpoint [1]  Updates=4000 ...`, `Train-ppl=...`", r"Checkpoint \[\d+\]\s+Updates=",
        counts_within_epoch=False, averaged="the steps since the checkpoint before",
    ),
    LogDescription(
        "coqui", "Coqui TTS: `--> STEP: 27/36 -- GLOBAL_STEP: 100`, then `| > loss: 3.05 (2.96)` on each line",
        r"-- GLOBAL_STEP: \d+", counts_within_epoch=False,
        columns={"grad_norm_1": "grad_norm", "current_lr_1": "lr", "amp_scaler": "loss_scale"},
    ),
    LogDescription(
        "deepspeed", "DeepSpeed: `step=N, skipped=K, lr=[...]`, its timers, the loops of its examples",
        r"\bstep=\d+, skipped=\d+, lr=\[|\|ppo_ep: ", columns={"act_loss": "loss"},
    ),
    LogDescription(
        "nanogpt", "nanoGPT, build-nanogpt, llm.c, modded-nanogpt, parameter-golf",
        r"(?m)^(?:\S+ )?(?:iter \d+: loss |step:\d+(?:/\d+)? \w+:|step\s+\d+(?:/\d+)? \||\d+ train [\d.]+$|s:\d+ trl:)",
        columns={"step_avg": "seconds"},
    ),
    LogDescription(
        "mlperf", "MLPerf logs (`:::MLL`) with the consoles of GNMT and Mask R-CNN", r":::MLL|\bTRAIN \[\d+\]\[",
        columns={"Time": "seconds"},
    ),
    LogDescription(
        "chinese_ner", "ChineseNER and its copies: `iteration:3 step:456/652, NER loss: 3.245`; an iteration is an epoch",
        r"\biteration:\d+ step:\d+/\d+", columns={"iteration": "epoch"},
    ),
    LogDescription(
        "dl4j", "Deeplearning4j: `Score at iteration 100 is 1.39`", r"Score at iteration \d+ is ", columns={"Score": "loss"}
    ),
    *(LogDescription(name, description, signature) for name, description, signature in (
        ("composer", "MosaicML Composer and LLM Foundry: `[batch=N/M]:`, then one metric on each line",
         r"\bbatch=\d+(?:/\d+)?\]:"),
        ("boxes", "boxes of Stable-Baselines and OpenAI baselines: `| ep_rew_mean | 21.4 |`",
         r"(?m)^\| +(?:\w+/)?(?:ep_?rew_?mean|EpRewMean|AverageEpRet)"),
        ("opennmt", "OpenNMT-py: `Step 50/100000; acc: 4.71; ppl: 8342.21; xent: 9.03; lr: ...`", r"; xent: "),
        ("joeynmt", "JoeyNMT: `Epoch 1, Step: 100, Batch Loss: 5.12, ..., Lr: ...`", r"Step:\s*\d+, Batch Loss:"),
        ("caffe", "Caffe: `Iteration 500, loss = 8.9`, then outputs of the net and the learning rate",
         r"Iteration \d+(?: \([^)]*\))?, loss = "),
        ("paddle", "PaddleVideo, PaddleDetection and others: `epoch:[  1/25 ] train step:0  loss: ...`", r"batch_cost:"),
        ("cyclegan", "CycleGAN and pix2pix: `(epoch: 1, iters: 100, time: ..., data: ...) D_A: ... G_A: ...`",
         r"\(epoch: \d+, iters: \d+, time: "),
        ("vits", "VITS, so-vits-svc: `Losses: [2.7, 2.7, 7.2, 30.2, 3.6], step: 800, lr: 0.0001`",
         r"(?:Losses: |\xef\xbc\x9a)\["),
        ("yolo_txt", "YOLOv5 results.txt: columns without a header, one row an epoch", r"\A\s+\d+/\d+\s+[\d.]+G\s"),
        ("torchtune", "torchtune's log: `Step 1 | loss:1.23 lr:2e-05 ...`", r"(?m)^Step \d+ \| \w+:"),
    )),
)  # fmt: skip


def all_descriptions() -> list[LogDescription]:
    """Return the built-in descriptions, and those of installed packages."""
    found = list(_DESCRIPTIONS)
    for point in entry_points(group="holdfast.formats"):
        try:
            description = point.load()
            if not isinstance(description, LogDescription):
                raise TypeError(f"is a {type(description).__name__}, not a LogDescription")
            found.append(description)
        except Exception as error:  # code of another package
            logger.warning(
                "holdfast: log format %s is left out: %s; update or uninstall its package", point.name, error
            )
    return [*found, GENERIC]
