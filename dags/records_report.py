"""A second DAG, on the data set: a page to look at for each day's records, once verified."""

from __future__ import annotations

import datetime

from airflow.sdk import Asset, Param, dag, task

RECORDS = Asset(name="tpufeed_records", uri="x-tpufeed://records")


@task
def report(params=None, triggering_asset_events=None) -> list[str]:
    """Writes report.html into each folder that was verified since; returns their paths."""
    import tpufeed_steps as steps

    folders = sorted({event.extra["folder"] for event in triggering_asset_events[RECORDS]})
    for folder in folders:
        steps.tpufeed(params["python"], "report", folder)
    return [f"{folder}/report.html" for folder in folders]


@dag(
    schedule=[RECORDS],
    start_date=datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
    params={"python": Param("/opt/tpufeed/bin/python", type="string", minLength=1)},
    tags=["tpufeed"],
)
def records_report():
    """Follows the asset that images_to_tpu publishes."""
    report()


records_report()
