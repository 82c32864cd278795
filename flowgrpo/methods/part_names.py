"""Parts by their place and module; presets of language models by their module.

`scripts/docs/build_docs.py` writes this file from the decorators `flowgrpo.parts.part` and the public functions.
"""

from __future__ import annotations

MODULES: dict[str, dict[str, str]] = {
    "target": {
        "methods.targets": "RecordedSteps JointDensity NoisedFinals RewardGradient LatentEdits",
        "text.targets": "Completions ImageTokens RelaxedTraces"},
    "kernel": {
        "samplers.kernels": "ODE FlowSDE DanceSDE CPS FlowDDIM DDIM VPCPS AnnealedNoise LearnedNoise"},
    "decoding": {
        "text.samplers.decoding": "Decoding WithAnswers Unmasking",
        "contrib.annealing": "AnnealedDecoding SpanDecoding"},
    "plan": {
        "samplers.plans": "AllSteps RandomSubset NoSteps Single EachStep Branches GrowingTail LastSteps RandomLast "
                          "LateStep Sliding TreeWindow"},
    "solver": {
        "samplers.kernels": "Euler DPMSolver2M"},
    "tail": {
        "samplers.grids": "TailPoints"},
    "shaping": {
        "advantages.shaping": "Unlikely WinRate Binary Overlong BradleyTerry Balanced Compressed",
        "text.credit": "ExpertReward LengthSwitch ExitDecay",
        "contrib.shapings": "LikelihoodConsistency Episodic"},
    "advantage": {
        "advantages.baselines": "VirtualBest First SameNoise NoBaseline Unrewarded Conditional ShiftedMean Paired "
                                "Correctness Signed Decoupled",
        "advantages.group": "Advantage Pooled",
        "advantages.trackers": "ValueTracker SmoothStandardised PriorBlend",
        "contrib.reshaped": "Difficulty Confidence Unconfident Consistency",
        "contrib.reward_weights": "Influence Hypervolume HardPrompts ForwardCorrected",
        "contrib.risk": "RiskAverse"},
    "selection": {
        "advantages.selection": "BestWorst MaxVariance Extremes WidthPruning Beyond ButFirst DropZeroVariance "
                                "PairedGroups",
        "contrib.downsampling": "ResampleCorrect Consistent"},
    "log_ratio": {
        "objectives.ratios": "PlainRatio Guard SquaredErrorRatio SequenceRatio CompletionRatio Matching"},
    "surrogate": {
        "objectives.forward_process": "NegativeAware CentredReward GroupPreference Preference StepPreference",
        "objectives.sequence_losses": "TaperedReinforce NegativeAwareText Discriminative Regressed PairwisePreference "
                                      "PairLoss",
        "objectives.surrogates": "Clip AdaptiveClip DualClip SoftGate DynamicClip DivergenceMask Reinforce KLOnly "
                                 "TruncatedIS RewardAscent ActorCritic",
        "text.losses": "EntropyBonus HighEntropy ConflictTokens LikelihoodFloor ExpertMixture Calibrated "
                       "RandomPolicyValue RewardLabels",
        "contrib.surrogates": "PolicyShaping TokenWeights"},
    "step_weight": {
        "objectives.reductions": "Uniform InverseDelta Sigma NoiseLevel"},
    "reduction": {
        "objectives.reductions": "TokenMean SequenceMean SequenceSum"},
    "kl": {
        "objectives.kl": "GaussianKL OutputError SampledKL SpanKL"},
    "kl.schedule": {
        "objectives.kl": "Linear Adaptive"},
    "reference": {
        "objectives.references": "Base EMA PreviousPolicy WeightAverage Teacher Teachers Soup SelfTeacher"},
    "rehearsal": {
        "contrib.rehearsal": "Rehearsal"},
    "distil": {
        "methods.distillation": "DistributionMatching RewardedMatching ConsistencyDistillation"},
    "tuning": {
        "objectives.supervised": "LayerTuning"},
    "data": {
        "methods.supervised": "NextToken PreferencePairs AlignedChains FlowMatching GuidanceDistillation PicturePairs "
                              "SelfAnswers"},
    "data.source": {
        "methods.supervised": "Recorded PassRate Explained"},
    "data.balance": {
        "objectives.supervised": "FixedWeights WarmupCosine GradientNorms EqualNorms Convergence"},
    "data.token_weight": {
        "objectives.supervised": "EqualTokens Uncertain EntropyAware OneToken"},
    "preview": {
        "samplers.preview": "Preview"},
    "times": {
        "samplers.noised_finals": "GridTimes RandomGridTimes Stratified"},
    "lag": {
        "samplers.old_policy": "Lag"},
    "backprop": {
        "samplers.reward_gradient": "Unroll OneStep"},
    "relaxation": {
        "text.samplers.gumbel_softmax": "GumbelSoftmax"},
    "adapted": {
        "methods.groups": "Adapted"},
    "draws": {
        "text.samplers.groups": "Independent EarlyExits SecondAttempt PrunedDraws Tree",
        "text.samplers.lookahead": "BranchingLookahead",
        "contrib.branching": "CriticalTokens SemanticBranches"},
    "spread": {
        "advantages.token_credit": "SegmentChain SegmentTree StepGroups MergedSteps Planning Exploring",
        "text.credit": "StepScores"},
    "curriculum": {
        "curriculum.history": "VarianceSampling InformationGain Retention OppositePairs GradientVariance",
        "curriculum.order": "EpochPermutation ThompsonSampling Knapsack",
        "contrib.curricula": "CategoryBandit PredictedDifficulty",
        "contrib.variants": "Variations"},
    "expansion": {
        "curriculum.resampling": "Expansion"},
    "redraw": {
        "curriculum.resampling": "DynamicSampling AdditionalGroups Hints ExtraRollouts TeacherAnswers",
        "contrib.hint_length": "HintLength"},
    "replay": {
        "contrib.group_replay": "GroupReplay"},
    "pruning": {
        "samplers.preview": "Pruning"},
    "progress": {
        "advantages.token_credit": "Progress"},
    "value": {
        "advantages.gae": "ValueHead OutcomeHead Recall"},
    "edit": {
        "samplers.latent_edits": "Edit"}}
PRESETS: dict[str, str] = {
    "text.presets.completions": "grpo dr_grpo dapo dcpo gspo sapo cispo rloo reinforce_pp remax ppo topr nft "
                                "disco reg_grpo real pacs rover sdpo dpo simpo hypo trpa w_reinforce gtpo "
                                "grpo_lambda spo_chain spo_tree gigpo s_grpo latr trace_rl trace_rl_value unirl "
                                "unirl_sft",
    "text.presets.overlays": "entropy_bonus high_entropy llds visurf rl_plus chord relift",
    "text.presets.relaxed": "drakes"}
