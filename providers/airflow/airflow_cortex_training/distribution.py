"""Which client is installed: ours and the public one share an import name, so only one of them may be there."""

from __future__ import annotations

from importlib import metadata

OTHER_CLIENT = "cortex-training"


def refuse_other_client() -> None:
    """Raise ImportError when the public client is installed too: whichever came last would be imported, unsaid.

    Called where the client is about to be imported, not in the package itself: Airflow reads the provider's metadata
    from there at every start, and an error would take the connection form away together with the explanation.
    """
    try:
        metadata.distribution(OTHER_CLIENT)
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"airflow-provider-cortex-training needs cortex-training-client, and {OTHER_CLIENT} is installed beside it "
        f"under the same import name. Run `pip uninstall -y {OTHER_CLIENT} cortex-training-client`, then `pip install "
        "cortex-training-client`, which serves the same imports"
    )
