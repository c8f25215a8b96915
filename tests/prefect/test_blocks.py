"""What Prefect asks of every block, and what these blocks promise beyond it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from prefect_snowflake import SnowflakeCredentials

from cortex_training.errors import ConfigurationError
from demo.prefect_server import PrefectServer
from prefect_cortex_training import CortexTrainingCredentials, CortexTrainingJob

PAT = "pat-that-must-never-be-seen"


def reachable(url: object) -> bool:
    try:
        urlopen(str(url), timeout=5).close()
    except (URLError, OSError):
        return False
    return True


@pytest.mark.parametrize("block", [CortexTrainingCredentials, CortexTrainingJob])
class TestBlockStandards(BlockStandardTestSuite):
    @pytest.fixture
    def block(self) -> type[Block]:
        raise AssertionError("given by parametrize")

    def test_has_a_valid_image(self, block: type[Block]) -> None:
        """The suite fetches the logo. From where it can't, it is at least the one that prefect-snowflake shows."""
        assert str(block._logo_url) == str(SnowflakeCredentials._logo_url)
        if not reachable(block._logo_url):
            pytest.skip("the logo is fetched over the network, which can't be reached from here")
        super().test_has_a_valid_image(block)


def credentials(**changed: Any) -> CortexTrainingCredentials:
    values: dict[str, Any] = {"host": "http://127.0.0.1:9", "database": "DB", "schema_": "S", "pat": PAT}
    return CortexTrainingCredentials(**{**values, **changed})


def test_types_are_registered_by_the_command_line(prefect_server: PrefectServer) -> None:
    command = [sys.executable, "-m", "prefect", "block", "register", "-m", "prefect_cortex_training"]
    done = subprocess.run(command, env=prefect_server.environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Cortex Training Credentials" in done.stdout
    assert "Cortex Training Job" in done.stdout


def test_a_saved_block_comes_back_with_its_secrets(on_server: PrefectServer) -> None:
    credentials(proxy="http://user:secret@proxy:3128", ca_bundle="/etc/ca.pem", verify_ssl=False).save("round-trip")
    loaded = CortexTrainingCredentials.load("round-trip")
    assert loaded.pat.get_secret_value() == PAT
    assert loaded.proxy is not None
    assert loaded.proxy.get_secret_value() == "http://user:secret@proxy:3128"
    assert (loaded.schema_, loaded.ca_bundle, loaded.verify_ssl) == ("S", "/etc/ca.pem", False)


def test_a_job_block_holds_its_credentials(on_server: PrefectServer) -> None:
    credentials().save("for-a-job", overwrite=True)
    block = CortexTrainingCredentials.load("for-a-job")
    CortexTrainingJob(credentials=block, sub_jobs=[{"job_type": "training"}]).save("a-job")
    loaded = CortexTrainingJob.load("a-job")
    assert loaded.credentials.pat.get_secret_value() == PAT
    assert loaded.sub_jobs == [{"job_type": "training"}]


def test_the_schema_is_accepted_under_either_name() -> None:
    by_alias = CortexTrainingCredentials(host="h", database="DB", schema="OTHER", pat=PAT)
    assert by_alias.schema_ == "OTHER"
    assert by_alias.model_dump(by_alias=True)["schema"] == "OTHER"


def test_secrets_are_in_no_representation() -> None:
    block = credentials(proxy=f"http://user:{PAT}@proxy:3128")
    shown = [repr(block), str(block), block.model_dump_json(), repr(block.model_dump())]
    with credentials().get_client() as client:
        shown += [repr(client), str(client), str(vars(client))]
    assert not [text for text in shown if PAT in text]


async def test_an_unknown_block_is_named_with_the_fix(on_server: PrefectServer) -> None:
    from prefect_cortex_training.credentials import load_credentials

    with pytest.raises(ConfigurationError, match="nobody-saved-this") as caught:
        await load_credentials("nobody-saved-this")
    assert "prefect block register -m prefect_cortex_training" in str(caught.value)
