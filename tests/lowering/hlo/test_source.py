"""The user's line of an instruction, in both notations of compilers."""

import pytest

from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.lowering.hlo.source import InstructionSources

TABLES = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/user/train.py"
2 "/home/user/layers.py"
3 "/opt/lib/python3.11/site-packages/flax/linear.py"

FunctionNames
1 "step"
2 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=3 end_line=3 column=4 end_column=9}
3 {file_name_id=3 function_name_id=2 line=99 end_line=99 column=4 end_column=9}

StackFrames
"""
SHIFTED = """1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=3 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=2}
"""
PLAIN = """1 {file_location_id=1}
2 {file_location_id=3 parent_frame_id=1}
3 {file_location_id=2 parent_frame_id=1}
"""
BODY = '\nENTRY %main (p: f32[2]) -> f32[2] {\n9 "not a table"\n}\n'


def read(text):
    return InstructionSources(text, parse_module(text))


@pytest.mark.parametrize("frames", [SHIFTED, PLAIN], ids=["callers from 1", "callers"])
def test_stack_frames(frames):
    lines = read(TABLES + frames + BODY)
    assert str(lines.of('metadata={op_name="a" stack_frame_id=3}')) == "layers.py:3"
    assert str(lines.of('metadata={op_name="a" stack_frame_id=2}')) == "train.py:12"  # called from a library
    assert lines.of("metadata={stack_frame_id=3}").function == "layer"
    assert str(lines.of("metadata={stack_frame_id=7}")) == str(lines.of("no metadata")) == "?"


def test_lines_in_the_instruction():
    lines = read("HloModule jit_step\n\nENTRY %main {\n}")
    assert str(lines.of('metadata={op_name="a" source_file="/home/user/train.py" source_line=7}')) == "train.py:7"
    library = 'metadata={source_file="/opt/site-packages/flax/linear.py" source_line=9}'
    assert str(lines.of(library)) == "linear.py:9"


def test_what_the_partitioner_inserts_belongs_to_what_reads_it():
    lines = read(
        """HloModule jit_step

ENTRY %main (w: f32[2]) -> f32[8] {
  %w = f32[2]{0} parameter(0), metadata={op_name="w"}
  %all-gather = f32[8]{0} all-gather(%w), dimensions={0}, metadata={op_name="w"}
  %copy = f32[8]{0} copy(%all-gather)
  ROOT %sine = f32[8]{0} sine(%copy), metadata={op_name="jit(step)/sin" source_file="/home/user/a.py" source_line=5}
}
"""
    )
    assert str(lines.of(lines.metadata("all-gather", 'metadata={op_name="w"}'))) == "a.py:5"
    own = 'metadata={op_name="x" source_file="/home/user/b.py" source_line=6}'
    assert lines.metadata("all-gather", own) == own
    assert str(lines.of(lines.metadata("sine", "nothing"))) == "?"


def test_what_the_partitioner_inserts_on_a_result_belongs_to_what_makes_it():
    lines = read(
        """HloModule jit_step

ENTRY %main (x: f32[2]) -> f32[8] {
  %x = f32[2]{0} parameter(0), metadata={op_name="x"}
  %sine = f32[2]{0} sine(%x), metadata={op_name="jit(step)/sin" source_file="/home/user/a.py" source_line=5}
  %copy = f32[2]{0} copy(%sine)
  ROOT %all-gather = f32[8]{0} all-gather(%copy), dimensions={0}
}
"""
    )
    assert str(lines.of(lines.metadata("all-gather", "dimensions={0}"))) == "a.py:5"
