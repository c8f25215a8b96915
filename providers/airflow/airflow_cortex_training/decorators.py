"""``@task.cortex_training_dataset``: a function whose rows become a dataset, without passing through an XCom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from airflow_cortex_training.operators.datasets import CortexTrainingBuildDatasetOperator


class _BuildDatasetDecoratedOperator(DecoratedOperator, CortexTrainingBuildDatasetOperator):
    custom_operator_name = "@task.cortex_training_dataset"
    template_fields: Sequence[str] = tuple(
        dict.fromkeys((*DecoratedOperator.template_fields, *CortexTrainingBuildDatasetOperator.template_fields))
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **CortexTrainingBuildDatasetOperator.template_fields_renderers,
    }
    shallow_copy_attrs: Sequence[str] = ("python_callable", "rows")

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kwargs_to_upstream={"rows": python_callable, "op_args": op_args, "op_kwargs": op_kwargs},
            python_callable=python_callable,
            op_args=op_args,
            op_kwargs=op_kwargs,
            **kwargs,
        )


def cortex_training_dataset_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Make a task of a function that returns or yields rows; `CortexTrainingBuildDatasetOperator` builds the dataset.

    ::

        @task.cortex_training_dataset(out="/mnt/finetune/data", tokenizer="/mnt/finetune/tokenizer", max_seq_len=2048)
        def reviews(day: str):
            for review in my_store.reviews(day):
                yield {"prompt": review.text, "completion": review.label}

    Arguments are those of the operator without `sql` and its kin. The result is the operator's.
    """
    return task_decorator_factory(
        python_callable=python_callable,
        # The operator's result, not the function's: its annotation has no say.
        multiple_outputs=True,
        decorated_operator_class=_BuildDatasetDecoratedOperator,
        **kwargs,
    )
