"""The dashboard against the types that Grafana publishes for dashboards, @grafana/schema, with the TypeScript compiler."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT

DASHBOARD = ROOT / "monitoring" / "grafana.json"
# In JSON an enumeration is the string of its member. A panel's type names the type of its options.
TYPES = """\
import type { Dashboard, FieldConfig, FieldConfigSource, Panel } from "@grafana/schema";
import type {
  FieldConfig as Curves,
  Options,
} from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

type Json<T> = T extends string ? `${T}`
  : T extends (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> }
  : T;
interface Query { refId: string; expr: string; legendFormat: string }
interface Defaults extends Omit<FieldConfig, "custom"> { custom: Partial<Curves> }
interface Fields extends Omit<FieldConfigSource, "defaults"> { defaults: Defaults }
interface TimeSeries extends Omit<Panel, "fieldConfig" | "options" | "targets" | "type"> {
  type: "timeseries"; options?: Partial<Options>; targets: Query[]; fieldConfig: Fields;
}
"""

Check = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Returns a function: the messages of the compiler about a dashboard."""
    if "NODE_MODULES" not in os.environ:
        pytest.skip("requires @grafana/schema and typescript, which .ci/run installs")
    modules = Path(os.environ["NODE_MODULES"]).resolve()
    folder = tmp_path_factory.mktemp("grafana")
    (folder / "node_modules").symlink_to(modules)

    def compile_dashboard(dashboard: dict[str, Any]) -> str:
        panels = [f"const panel{n}: Json<TimeSeries> = {json.dumps(p)};" for n, p in enumerate(dashboard["panels"])]
        whole = f"const dashboard: Json<Dashboard> = {json.dumps(dashboard | {'panels': []})};"
        (folder / "dashboard.ts").write_text("\n".join([TYPES, whole, *panels, ""]))
        compiler = [modules / ".bin/tsc", "--noEmit", "--strict", "--moduleResolution", "bundler", "--module", "esnext"]
        done = subprocess.run([*compiler, "dashboard.ts"], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or done.stdout, done.stderr
        return done.stdout

    return compile_dashboard


@pytest.mark.slow
def test_the_dashboard_has_the_published_types(check: Check) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert len(dashboard["panels"]) > 10
    assert check(dashboard) == ""


def test_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        x, y, width, height = (panel["gridPos"][key] for key in ("x", "y", "w", "h"))
        assert x + width <= 24, f"{panel['title']} is wider than the dashboard"
        for cell in ((column, row) for column in range(x, x + width) for row in range(y, y + height)):
            assert cell not in taken, f"{panel['title']} overlaps {taken[cell]}"
            taken[cell] = panel["title"]
