#!/usr/bin/env bash
# Trains three short runs, and makes the pictures of docs/comparing.md from them. Requires matplotlib and Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

train() {
  ./run_train.sh train_configs/debug.toml --run.dir="$folder/runs" --training.steps=40 --training.global_batch_size=8 --validation.interval=8 \
    --validation.batches=1 --metrics.interval=1 --sample.tokens=0 --metrics.tensorboard=false "$@"
}
train --run.name=muon
train --run.name=adamw --optimizer.groups='[]' --optimizer.lr=1.5e-3
train --run.name=adamw-high-lr --optimizer.groups='[]' --optimizer.lr=6e-3

titanlike compare "$folder"/runs/{adamw,adamw-high-lr,muon} --html "$folder/compare.html" --png docs/comparison.png
chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,1240 --user-data-dir="$folder/browser" \
  --screenshot=docs/comparison_page.png "file://$folder/compare.html"
