"""The questions of the tree. Importing this package registers them."""

import holdfast.diagnosis.tree.questions.data
import holdfast.diagnosis.tree.questions.divergence
import holdfast.diagnosis.tree.questions.layers
import holdfast.diagnosis.tree.questions.machine
import holdfast.diagnosis.tree.questions.nonfinite
import holdfast.diagnosis.tree.questions.precision
import holdfast.diagnosis.tree.questions.schedule
import holdfast.diagnosis.tree.questions.spike
import holdfast.diagnosis.tree.questions.whole_run  # noqa: F401
