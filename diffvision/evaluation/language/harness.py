"""The paper's zero-shot tasks, for lm-evaluation-harness."""

ZERO_SHOT_TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
"""The seven tasks of arXiv 2410.05258, table 1, by the names of EleutherAI's lm-evaluation-harness:

    lm_eval --model hf --model_args pretrained=PATH --num_fewshot 0 \\
        --tasks arc_challenge,arc_easy,boolq,hellaswag,openbookqa,piqa,winogrande

PATH is a model in Hugging Face's layout. The paper's table gives accuracy and does not say where it is normalised by
length (`acc_norm`), so state which one is compared.
"""
