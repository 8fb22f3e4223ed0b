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
        name="torchtitan",
        description="torchtitan's console: `step: N  loss: ...  grad_norm: ...  memory: ...  tps: ...`",
        markers=("step:",),
        record=r"(?<!validate )\bstep:\s*(?P<step>\d+)\s+loss:\s+\S+\s+(?:grad_norm|memory|tps|gnorm):",
        evaluation=r"\b(?P<name>validate) step:\s*\d+\s+(?=(?:\w+ )?loss:)",
        columns={"gnorm": "grad_norm", "memory": "memory_reserved", "wps": "tokens_per_second"},
        counts_within_epoch=False,
    ),
    LogDescription(
        name="kempnerforge",
        description="KempnerForge's console: `[step N] loss=... | lr=... | grad_norm=... | ...`",
        markers=("[step ",),
        record=r"\[step\s+(?P<step>\d+)\] (?=(?!eval|val)[\w/]+=)",
        evaluation=r"\[step\s+\d+\] (?=(?:eval|val)[\w/]*=)",
        columns={"mem": "memory_peak", "tok/s": "tokens_per_second"},
        counts_within_epoch=False,
    ),
    LogDescription(
        name="composer",
        description="MosaicML Composer and LLM Foundry: `[batch=N/M]:`, then one metric on each line",
        markers=("batch=",),
        record=r"\[(?:epoch=(?P<epoch>\d+)(?:/\d+)?\]\[)?batch=(?P<step>\d+)(?:/\d+)?\]:(?=.*\bTrain (?!time/))",
        evaluation=r"\[(?:epoch=\d+(?:/\d+)?\]\[)?batch=\d+(?:/\d+)?\]:(?!.*\bTrain (?!time/))(?=.*\bEval )",
        continues=r"\n{0,2}(?:\d+:|\[?\w*rank\d+\]?:)?[ \t]{1,40}(?:Train|Eval) ",
        columns={"Train loss/train/total": "loss", "loss/train/total": "loss", "Train time/batch": "",
                 "Train time/epoch": "", "time/batch": "", "time/epoch": ""},
    ),
    LogDescription(
        name="olmo",
        description="OLMo's console: `[step=N/M]`, then one metric on each line",
        markers=("[step=",),
        record=r"\[step=(?P<step>\d+)(?:/\d+)?(?:,epoch=(?P<epoch>\d+)[^\]]*)?\](?=.*CrossEntropyLoss=)",
        evaluation=r"\[(?P<name>eval)[_ ]step=|(?=.*\beval/)\[step=\d+",
        continues=r"[ \t]{2,}[\w/ .()-]+=",
        columns={"train/CrossEntropyLoss": "loss", "optim/total_grad_norm": "grad_norm", "total_grad_norm": "grad_norm",
                 "optim/learning_rate_group0": "lr"},
        counts_within_epoch=False,
    ),
    LogDescription(
        name="boxes",
        description="boxes of Stable-Baselines and OpenAI baselines: `| ep_rew_mean | 21.4 |`",
        markers=("rew_mean", "eprewmean", "EpRewMean", "EpRet", "total_timesteps", "reward"),
        record=r"^-{3,}(?=.*(?:rew|Rew|EpRet|[Ll]oss))",
        boxes=True,
    ),
    LogDescription(
        name="detectron2_text",
        description="detectron2's console: `eta: ...  iter: N  total_loss: ...`",
        markers=("total_loss",),
        record=r"\biter: (?P<step>\d+)\s+total_loss: (?P<loss>" + _N + ")",
        columns={"time": "seconds", "max_mem": "memory_mb", "eta": ""},
        counts_within_epoch=False,
        averaged="the last 20 steps (a median)",
    ),
    LogDescription(
        name="mmengine_text",
        description="mmengine and mmcv consoles: `Epoch(train) [1][50/7330]  lr: ...  loss: ...`, `Iter [50/80000]`",
        markers=("Epoch(train)", "Iter(train)", "INFO - Epoch [", "INFO - Iter [", "Epoch [", "Iter ["),
        record=r"(?:Epoch(?:\(train\))?\s*\[(?P<epoch>\d+)\]\[\s*(?P<step>\d+)/(?P<steps_of_epoch>\d+)\]|"
        r"Iter(?:\(train\))?\s*\[\s*(?P<iter>\d+)/\d+\])\s+(?=.*loss)",
        evaluation=r"(?:Epoch|Iter)\((?P<name>val|test)\)\s*\[\d+\]",
        columns={"iter": "step", "time": "seconds", "memory": "memory_mb", "eta": ""},
    ),
    LogDescription(
        name="opennmt",
        description="OpenNMT-py: `Step 50/100000; acc: 4.71; ppl: 8342.21; xent: 9.03; lr: ...`",
        markers=("xent:",),
        record=r"\bStep (?P<step>\d+)/\s*\d+; acc:.*xent:\s*(?P<loss>" + _N + ")",
        evaluation=r"(?P<name>Validation) (?=perplexity|accuracy)",
        counts_within_epoch=False,
    ),
    LogDescription(
        name="sockeye",
        description="Sockeye: `Checkpoint [1]  Updates=4000 ...`, `Train-ppl=...`",
        markers=("Train-ppl", "Train-perplexity"),
        record=r"Checkpoint \[\d+\]\s+Updates=(?P<step>\d+).*Train-(?:ppl|perplexity)=(?P<ppl>" + _N + ")",
        evaluation=r"Checkpoint \[\d+\]\s+(?=(?P<name>Validation)-)",
        continues=r"\[[^\]\n]*\] Checkpoint \[\d+\]\s+(?:Train-|Learning-rate)",
        columns={"Learning-rate": "lr", "Train-ppl": "", "Train-perplexity": ""},
        counts_within_epoch=False,
        averaged="the steps since the checkpoint before",
        decides=True,
    ),
    LogDescription(
        name="joeynmt",
        description="JoeyNMT: `Epoch 1, Step: 100, Batch Loss: 5.12, ..., Lr: ...`",
        markers=("Batch Loss:",),
        record=r"\bStep:\s*(?P<step>\d+),\s+Batch Loss:\s*(?P<loss>" + _N + ")",
        evaluation=r"(?P<name>Validation) result|^Steps: \d+\s+Loss:",
        columns={"Tokens per Sec": "tokens_per_second", "Lr": "lr"},
        counts_within_epoch=False,
    ),
    LogDescription(
        name="espnet",
        description="ESPnet: `1epoch:train:1-100batch: iter_time=..., loss=...`",
        markers=("epoch:train:",),
        record=r"\b(?P<epoch>\d+)epoch:train:\d+-(?P<step>\d+)batch:",
        evaluation=r"\bepoch results: .*\[(?P<name>valid)\]",
        columns={"optim0_lr0": "lr", "train_time": "seconds"},
    ),
    LogDescription(
        name="coqui",
        description="Coqui TTS: `--> STEP: 27/36 -- GLOBAL_STEP: 100`, then `| > loss: 3.05 (2.96)` on each line",
        markers=("GLOBAL_STEP:",),
        record=r"--> STEP: \d+/\d+ -- GLOBAL_STEP: (?P<step>\d+)",
        evaluation=r"--> (?P<name>EVAL) PERFORMANCE",
        continues=r"[ \t]*\| > [\w ]+:",
        columns={"grad_norm_1": "grad_norm", "current_lr_1": "lr", "current_lr": "lr", "step_time": "seconds",
                 "amp_scaler": "loss_scale", "STEP": "", "GLOBAL_STEP": ""},
        parts=("loss_0", "loss_1"),
        counts_within_epoch=False,
    ),
    LogDescription(
        name="darknet",
        description="Darknet: `100: 2.345, 3.456 avg loss, 0.001 rate, 3.2 seconds, 6400 images`",
        markers=(" avg", "rate,"),
        record=r"^\s*(?P<step>\d+): (?P<loss>" + _N + "), (?P<mean_loss>" + _N + ") avg(?: loss)?, (?P<lr>" + _N
        + ") rate, (?P<seconds>" + _N + ") seconds",
        counts_within_epoch=False,
    ),
    LogDescription(
        name="caffe",
        description="Caffe: `Iteration 500, loss = 8.9`, then outputs of the net and the learning rate",
        markers=("Iteration ",),
        record=r"\] Iteration (?P<step>\d+)(?: \([^)]*\))?, loss = (?P<loss>" + _N + ")(?:.*, lr = (?P<lr>" + _N + "))?",
        evaluation=r"\] +(?P<name>Test) net output #\d+:",
        continues=r"[IWE]\d{4} [^\n]*(?:Train net output #|Iteration \d+, lr = )",
        columns={"loss": "", "lr": ""},
        counts_within_epoch=False,
    ),
    LogDescription(
        name="paddle",
        description="PaddleVideo, PaddleDetection and others: `epoch:[  1/25 ] train step:0  loss: ... batch_cost: ...`",
        markers=("batch_cost:",),
        record=r"(?:train step:|Epoch: \[\d+\] \[|\[T(?:rain|RAIN)\]|epoch: \[\d+/\d+\], (?:iter|global_step): )"
        r"(?=.*loss: )",
        evaluation=r"\b(?P<name>val|eval|Eval|EVAL|valid)\b.*loss",
        ignore=r"\bEND epoch",
        columns={"batch_cost": "seconds", "ips": "tokens_per_second"},
    ),
    LogDescription(
        name="cyclegan",
        description="CycleGAN and pix2pix loss_log.txt: `(epoch: 1, iters: 100, time: ..., data: ...) D_A: ... G_A: ...`",
        markers=("iters:",),
        record=r"\(epoch: (?P<epoch>\d+), iters: (?P<step>\d+), time: [\d.]+,[^)]*\) (?=\w+: )",
        columns={"time": "seconds"},
        parts=("G_A", "cycle_A", "idt_A", "G_B", "cycle_B", "idt_B", "D_A", "D_B", "G_GAN", "G_L1", "D_real", "D_fake"),
    ),
    LogDescription(
        name="vits",
        description="VITS and so-vits-svc: `Losses: [2.7, 2.7, 7.2, 30.2, 3.6], step: 800, lr: 0.0001`",
        markers=("Losses: [", "\u635f\u5931\uff1a[", "Train Epoch:"),
        record=r"\[(?P<loss_disc>\d+\.\d+|nan), (?P<loss_gen>" + _N + "), (?P<loss_fm>" + _N + "), (?P<loss_mel>" + _N
        + "), (?P<loss_kl>" + _N + r")[^\]]*?(?:\]\D*|, )(?P<step>\d+)\D+(?P<lr>" + _N + ")",
        counts_within_epoch=False,
    ),
    LogDescription(
        name="yolo_txt",
        description="YOLOv5 results.txt: columns without a header, one row an epoch",
        markers=("G ",),
        record=r"^\s+(?P<step>\d+)/\d+\s+[\d.]+G\s+(?P<box_loss>" + _N + r")\s+(?P<obj_loss>" + _N
        + r")\s+(?P<cls_loss>" + _N + r")\s+(?P<loss>" + _N + r")\s+\d+\s+\d+\s",
        unit="epoch",
        counts_within_epoch=False,
    ),
    LogDescription(
        name="torchtune",
        description="torchtune's log: `Step 1 | loss:1.23 lr:2e-05 tokens_per_second_per_gpu:...`",
        markers=("Step ",),
        record=r"^Step (?P<step>\d+) \| (?=.*\bloss:)",
        columns={"tokens_per_second_per_gpu": "tokens_per_second", "peak_memory_reserved": "memory_reserved"},
        counts_within_epoch=False,
    ),
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
