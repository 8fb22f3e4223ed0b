"""The questions, one file a section of the tree. Importing this package registers them all."""

import holdfast.diagnosis.tree.questions.course
import holdfast.diagnosis.tree.questions.data
import holdfast.diagnosis.tree.questions.divergence
import holdfast.diagnosis.tree.questions.layers
import holdfast.diagnosis.tree.questions.machine
import holdfast.diagnosis.tree.questions.nonfinite
import holdfast.diagnosis.tree.questions.precision
import holdfast.diagnosis.tree.questions.schedule
import holdfast.diagnosis.tree.questions.spike  # noqa: F401
