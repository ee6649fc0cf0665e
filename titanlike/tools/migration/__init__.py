"""What users bring from other programs: their job configs as recipes, for `titanlike import` and `titanlike plan`."""
