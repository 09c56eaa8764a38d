"""The user's line of an instruction, in both notations of compilers."""

import pytest

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


@pytest.mark.parametrize("frames", [SHIFTED, PLAIN], ids=["callers from 1", "callers"])
def test_stack_frames(frames):
    lines = InstructionSources(TABLES + frames + BODY)
    assert str(lines.of('metadata={op_name="a" stack_frame_id=3}')) == "layers.py:3"
    assert str(lines.of('metadata={op_name="a" stack_frame_id=2}')) == "train.py:12"  # called from a library
    assert lines.of("metadata={stack_frame_id=3}").function == "layer"
    assert str(lines.of("metadata={stack_frame_id=7}")) == str(lines.of("no metadata")) == "?"


def test_lines_in_the_instruction():
    lines = InstructionSources("HloModule jit_step\n\nENTRY %main {\n}")
    assert str(lines.of('metadata={op_name="a" source_file="/home/user/train.py" source_line=7}')) == "train.py:7"
    library = 'metadata={source_file="/opt/site-packages/flax/linear.py" source_line=9}'
    assert str(lines.of(library)) == "linear.py:9"
