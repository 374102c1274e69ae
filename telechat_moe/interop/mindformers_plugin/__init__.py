"""What MindFormers loads: `run_mindformer.py --register_path` names this folder (`telechat-moe plugin-path`)."""
