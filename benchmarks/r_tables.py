"""Twenty tables with users that are not in the benchmark: does what is measured there hold elsewhere?

    coterie --import benchmarks/r_tables.py bench --data DIR --sets r-exam,r-storms --users 4
        --out bench

They are of the collection Rdatasets, and are registered as sets r-hpc, r-rats and so on. Each has a
column that says whose row it is: a school, a state, an industry, a town, a year. They are read from
DIR/Rdatasets/csv/PACKAGE/ITEM.csv, as that collection has them. Classes that fewer than one row in
25 has are left out, and of a long table 6,000 rows are drawn.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from coterie.benchmark import Population, register_set

MOST_ROWS, MOST_CLASSES, RAREST = 6000, 8, 0.04


class Table(NamedTuple):
    """Which table, whose rows they are, what is learned and from what."""

    item: str  # package and name in the collection
    user: str
    target: str
    columns: str = ""  # their names; all others when empty
    classes: bool = True  # else numbers


TABLES = {
    "hpc": Table("modeldata/hpc_data", "protocol", "class"),
    "rats": Table(
        "ratdat/complete", "plot_id", "species_id", "sex hindfoot_length weight month year"
    ),
    "verbagg": Table("lme4/VerbAgg", "item", "r2", "Anger Gender"),
    "ces11": Table("carData/CES11", "province", "abortion", "gender importance education urban"),
    "benefits": Table("Ecdat/Benefits", "state", "ui"),
    "storms": Table("dplyr/storms", "year", "status", "lat long wind pressure month hour"),
    "union": Table(
        "sampleSelection/nlswork",
        "occ_code",
        "union",
        "age race msp grade south c_city ttl_exp tenure wks_work ln_wage",
    ),
    "overtime": Table("modeldata/attrition", "JobRole", "OverTime"),
    "churn": Table("modeldata/mlc_churn", "state", "churn"),
    "trump": Table(
        "stevedata/TV16",
        "state",
        "votetrump",
        "age female collegeed famincr ideo pid7na bornagain religimp",
    ),
    "happy": Table(
        "wooldridge/happiness",
        "reg16",
        "vhappy",
        "workstat prestige divorce widowed educ income babies preteen teens owngun attend tvhours "
        "black female blackfemale gwbush04",
    ),
    "exam": Table(
        "mlmRev/Exam", "school", "normexam", "standLRT sex vr intake student", classes=False
    ),
    "egsingle": Table(
        "mlmRev/egsingle",
        "schoolid",
        "math",
        "year grade retained female black hispanic",
        classes=False,
    ),
    "star": Table(
        "Ecdat/Star",
        "schidkn",
        "tmathssk",
        "classk totexpk sex freelunk race treadssk",
        classes=False,
    ),
    "gapminder": Table(
        "dslabs/gapminder",
        "region",
        "life_expectancy",
        "year infant_mortality fertility population gdp",
        classes=False,
    ),
    "txhousing": Table(
        "ggplot2/txhousing",
        "city",
        "median",
        "year month sales volume listings inventory",
        classes=False,
    ),
    "ames": Table(
        "modeldata/ames",
        "Neighborhood",
        "Sale_Price",
        "Lot_Area Year_Built Gr_Liv_Area Total_Bsmt_SF Garage_Area Full_Bath TotRms_AbvGrd "
        "Fireplaces Overall_Cond Bldg_Type",
        classes=False,
    ),
    "census": Table(
        "wooldridge/census2000", "state", "lweekinc", "educ exper expersq", classes=False
    ),
    "scorecard": Table(
        "causaldata/scorecard",
        "state_abbr",
        "earnings_med",
        "pred_degree_awarded_ipeds count_not_working count_working year",
        classes=False,
    ),
    "wage": Table(
        "sampleSelection/nlswork",
        "ind_code",
        "ln_wage",
        "age race msp grade south c_city union ttl_exp tenure hours wks_work",
        classes=False,
    ),
}


def read(table: Table, folder: Path) -> Population:
    """Read a table: rows without an owner or a target are left out, other gaps are for the preparation."""
    rows = pd.read_csv(folder / "csv" / f"{table.item}.csv", low_memory=False)
    rows = rows.dropna(subset=[table.user, table.target])
    rows = rows.sample(min(len(rows), MOST_ROWS), random_state=0)
    columns = table.columns.split() or [
        str(c) for c in rows if c not in (table.user, table.target, "rownames")
    ]
    names: list[str] = []
    if table.classes:
        labels = rows[table.target].astype(str)
        counts = labels.value_counts()
        names = sorted(counts[counts >= RAREST * len(rows)].index[:MOST_CLASSES])
        rows = rows[labels.isin(names)]
    inputs = rows[columns].reset_index(drop=True)
    categories = tuple(inputs.select_dtypes(exclude="number").columns)
    inputs = inputs.astype(dict.fromkeys(categories, str))
    targets = rows[table.target].to_numpy()
    if table.classes:
        targets = np.searchsorted(names, targets.astype(str))
    return Population(
        inputs, targets, rows[table.user].astype(str).to_numpy(), len(names), categories
    )


for name, one in TABLES.items():
    register_set(
        f"r-{name}",
        models=("linear", "mlp"),
        own_examples=30 if one.classes else 20,
        most_peers=12,
        folder="Rdatasets",
        files=(f"csv/{one.item}.csv",),
        source="github.com/vincentarelbundock/Rdatasets",
    )(functools.partial(read, one))
