"""What a task's prompts are after Airflow rendered them: what their author wrote, down to the last newline."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_cortex_training.operators.sampling import CortexTrainingGenerateOperator
from cortex_training.errors import ConfigurationError

CONTEXT: Any = {"name": "heapq", "given": ["a\n", "b"]}


def rendered(prompts: Any, *, native: bool) -> Any:
    with DAG("d", schedule=None, render_template_as_native_obj=native):
        task = CortexTrainingGenerateOperator(task_id="t", job_id="{{ name }}", prompts=prompts, output_path="/tmp/o")
    task.render_template_fields(CONTEXT)
    assert task.job_id == "heapq"
    return task.prompts


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "prompt", ["one\n", "one\n\n", "\n", " 42", "42", "'yes'", "[1, 2]", "None", "a { b } % c # d", ""]
)
def test_a_text_that_is_no_template_stays_as_it_is(native: bool, prompt: str) -> None:
    assert rendered([prompt], native=native) == [prompt]


@pytest.mark.parametrize("native", [False, True])
def test_a_template_keeps_its_newline(native: bool) -> None:
    assert rendered(["{{ name }}.merge\n", "{% raw %}{{ x }}{% endraw %}\n"], native=native) == [
        "heapq.merge\n",
        "{{ x }}\n",
    ]


@pytest.mark.parametrize("native", [False, True])
def test_token_ids_stay_numbers(native: bool) -> None:
    assert rendered([[1, 2], [3]], native=native) == [[1, 2], [3]]


def test_a_template_may_be_the_whole_list() -> None:
    assert rendered("{{ given }}", native=True) == ["a\n", "b"]


def test_a_text_in_place_of_the_list_is_refused_with_the_cause() -> None:
    task = CortexTrainingGenerateOperator(task_id="t", job_id="j", prompts="['a', 'b']", output_path="/tmp/o")
    with pytest.raises(ConfigurationError, match="render_template_as_native_obj=True"):
        task.check()
