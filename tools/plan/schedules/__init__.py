"""Pipeline schedules: programs, exact simulation, lower bounds, synthesis."""

from telechat_moe.tools.plan.schedules.gpipe import gpipe
from telechat_moe.tools.plan.schedules.interleaved import one_f_one_b
from telechat_moe.tools.plan.schedules.program import Kind, Op, Program, Times
from telechat_moe.tools.plan.schedules.simulate import Result, simulate

__all__ = ["Kind", "Op", "Program", "Result", "Times", "gpipe", "one_f_one_b", "simulate"]
