"""The AWS launcher file validates against Ray's own schema and against the API that receives its node_config."""

from __future__ import annotations

import json
from importlib.resources import files

import jsonschema
import pytest
import yaml

from tests.deploy.manifests import DEPLOY

CONFIG = yaml.safe_load((DEPLOY / "aws/cluster.yaml").read_text())


def schema() -> dict:
    return json.loads(files("ray.autoscaler").joinpath("ray-schema.json").read_text())


def test_launcher_file_validates_against_rays_schema() -> None:
    jsonschema.validate(CONFIG, schema())


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(CONFIG | {"max_worker": 3}, schema())


@pytest.mark.parametrize("name", CONFIG["available_node_types"])
def test_node_config_is_what_ec2_takes(name: str) -> None:
    """Unknown or mistyped keys in node_config only fail when a node is bought; botocore knows them without the network."""
    import botocore.session
    from botocore.validate import ParamValidator

    client = botocore.session.get_session().create_client("ec2", region_name="us-east-1")
    shape = client.meta.service_model.operation_model("RunInstances").input_shape
    node = CONFIG["available_node_types"][name]["node_config"]
    report = ParamValidator().validate(node | {"MinCount": 1, "MaxCount": 1}, shape)
    assert not report.has_errors(), report.generate_report()
    assert node["MetadataOptions"]["HttpTokens"] == "required"


def test_head_is_on_demand_and_workers_are_spot() -> None:
    types = CONFIG["available_node_types"]
    head = types[CONFIG["head_node_type"]]
    assert "InstanceMarketOptions" not in head["node_config"]
    assert head["resources"]["CPU"] == 0
    workers = [node for name, node in types.items() if name != CONFIG["head_node_type"]]
    assert all(node["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot" for node in workers)
    assert all(node["min_workers"] == 0 for node in workers)
    assert CONFIG["provider"]["cache_stopped_nodes"] is False
