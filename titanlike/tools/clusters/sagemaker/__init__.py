"""SageMaker training jobs: their files, requests and submission, and what starts in their containers."""
