"""Start a cluster of two tensor-parallel ranks, answer some prompts, and end it."""

from stoker import LLM, SamplingParams


def main() -> None:
    prompts = ["The capital of France is", "A haiku about coal:", "Two plus two is"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(tensor_parallel_size=2, gpu_memory_utilization=0.8) as llm:
        varied = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=40)
        for output in llm.generate(prompts, varied):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        (answer,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=100))
        print(answer.outputs[0].text)


if __name__ == "__main__":
    main()
