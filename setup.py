"""Puts the programs and recipes, which a clone has at its top, inside of the package: a wheel has no other place for them."""

from setuptools import find_packages, setup

SHIPPED = {"titanlike.recipes": "recipes", "titanlike.train_configs": "train_configs"}

setup(
    packages=[*find_packages(include=["titanlike*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "titanlike.tools.comparison": ["page*.css", "page*.html", "page*.js"],
        "titanlike.tools.planning": ["hardware_files/*.toml"],
        "titanlike.train_configs": ["**/*.toml"],
    },
)
