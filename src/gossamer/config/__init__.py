"""The experiment file: its fields, the components that it names, and one clear error for each mistake in it."""

from gossamer.config.experiment import Experiment as Experiment
from gossamer.config.experiment import engine_name as engine_name
from gossamer.config.mappings import assign as assign
from gossamer.config.mappings import assign_all as assign_all
from gossamer.config.sections import Checkpoints as Checkpoints
from gossamer.config.sections import Count as Count
from gossamer.config.sections import Evaluation as Evaluation
from gossamer.config.sections import Failures as Failures
from gossamer.config.sections import Gather as Gather
from gossamer.config.sections import Processes as Processes
from gossamer.config.sections import Simulate as Simulate
from gossamer.config.sections import Stop as Stop
from gossamer.config.sections import Target as Target
from gossamer.config.sections import Timeline as Timeline
