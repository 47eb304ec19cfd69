"""The experiment file: its fields, the components that it names, and one error message for each mistake in
it."""

from gossamer.config.experiment import Checkpoints as Checkpoints
from gossamer.config.experiment import Count as Count
from gossamer.config.experiment import Evaluation as Evaluation
from gossamer.config.experiment import Experiment as Experiment
from gossamer.config.experiment import Failures as Failures
from gossamer.config.experiment import Gather as Gather
from gossamer.config.experiment import Processes as Processes
from gossamer.config.experiment import Simulate as Simulate
from gossamer.config.experiment import Stop as Stop
from gossamer.config.experiment import Target as Target
from gossamer.config.experiment import Timeline as Timeline
from gossamer.config.experiment import WarmStart as WarmStart
from gossamer.config.experiment import as_name as as_name
from gossamer.config.experiment import assign as assign
from gossamer.config.experiment import assign_all as assign_all
from gossamer.config.experiment import engine_name as engine_name
from gossamer.config.registry import Section as Section
