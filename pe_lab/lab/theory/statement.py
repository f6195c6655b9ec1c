"""A statement of a paper that arithmetic checks, and the papers' own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Number = float | list[float]
CORRECTED = ", corrected"


@dataclass(frozen=True)
class Statement:
    """A statement of a paper, and what this run measured.

    Where a formula or a constant of the paper fails and a neighbouring one holds, the latter is a record of its own,
    whose source ends with ", corrected". It is not of the paper.

    Attributes:
      source: the paper and the number of the theorem or equation.
      sentence: what is stated.
      measured: the result of this run, with numbers.
      holds: whether the numbers agree with the sentence.
      numbers: every number in `measured`, and the curves of figures, by name.
      note: what limits the result, or what a test would need in order to be able to fail.
      quote: the paper's own words (`QUOTES`); every statement that fails has them, and every note that names an error.
    """

    source: str
    sentence: str
    measured: str
    holds: bool
    numbers: Mapping[str, Number]
    note: str = ""
    quote: str = ""

    @property
    def corrected(self) -> bool:
        """Whether this is a form that replaces what a paper has."""
        return self.source.endswith(CORRECTED)

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else "fails"


def statement(
    source: str,
    sentence: str,
    measured: str,
    holds: bool | np.bool_,
    numbers: Mapping[str, Any],
    note: str = "",
) -> Statement:
    """The record, with `numbers` (floats, sequences, arrays of one axis) as plain floats and lists."""
    plain = {name: np.asarray(value, np.float64).tolist() for name, value in numbers.items()}
    quote = QUOTES.get(source.removesuffix(CORRECTED), "")
    return Statement(source, sentence, measured, bool(holds), plain, note, quote)


# ---------------------------------------------------------------------------------------------------------------------
# What the papers write, word for word, for the statements that fail and for notes that name an error: the source of a
# statement, without ", corrected", -> sentences and formulas of the paper, the latter in LaTeX as published on arXiv
# (the notebook's in its code). [...] stands for words that are left out.

_QUOTES = {
    "DroPE, Definition 3.1": r"""
        Attention heads with a strong positional bias would maximize the average value of ${{\bm{\mathsfit{A}}}}^{c}$
        across input sequences for some weights $c$. For example, a “diagonal” attention head, focusing mass on the
        current token, is exactly the maximizer of ${{\bm{\mathsfit{A}}}}^{c}$, with $c_{ij}$ having $1$s on the
        diagonal and $-\tfrac{1}{i-1}$ otherwise.""",
    "DroPE, Remark B.1, part (2)": r"""
        (2) query and key gradients vanish: $\partial{\mathcal{L}}/\partial W_{Q}=\partial{\mathcal{L}}/\partial
        W_{K}=0$ [...] Note that part (4) of the proposition holds for RoPE transformers as well. Parts (1), (2) and
        (3) do not.""",
    "DroPE, Proposition 3.3": r"""
        so the dependence in the parameters ${\theta}$ is entirely through $F_{i}:=\sum_{j\leq i}\alpha_{ij}^{2}.$
        [...] has strictly positive norm (a sum of nonzero matrices sharing the same nonzero right factor $x^{\top}$
        cannot be the zero matrix unless all left factors vanish, which they don’t for $i\geq 2$).""",
    "DroPE, Section 3.1": r"""
        At initialization, the entries of the embedding matrix are drawn i.i.d. from a distribution with a fixed small
        variance (commonly, $\sigma^{2}=0.02$). Therefore, the token embeddings are close to uniform at the beginning
        of training. [...] recall that $h_{i}$ are the output of a normalization layer, and therefore (at
        initialization) $\left\lVert h_{i}\right\rVert=\sqrt{d}$.""",
    "DroPE, Proposition B.3, eq. 12 and 13": r"""
        $s_{ij}-\bar{s}_{i}=\frac{1}{\sqrt{d_{k}}}q_{i}^{\top}k_{j}+\frac{1}{i}\sum_{r\leq
        i}\frac{1}{\sqrt{d_{k}}}q_{i}^{\top}k_{r}=\frac{1}{\sqrt{d_{k}}}q_{i}^{\top}(k_{j}-\bar{k}_{i}).$""",
    "DroPE, Section 4.1": r"""
        E.g. for a standard RoPE base $b=10^{4}$, a transformer with head dimension $d_{k}=64$, will have at least five
        low frequencies for which $\phi_{m}(C_{\mathrm{train}})<2\pi$, even at a training context of
        $C_{\mathrm{train}}=32{,}000$.""",
    "DroPE, eq. 3 and 10": r"""
        $\omega_{m}=b^{-2\frac{m-1}{d_{k}}}$ [...] $\omega_{m}^{\prime}=\gamma_{m}\omega_{m},\qquad
        m=1,\dots,\tfrac{d_{k}}{2},$ [...]
        $\gamma_{m}^{\mathrm{NTK}}=\left(\tfrac{1}{s}\right)^{\frac{2m}{d_{k}-2}},$ [...] so that low frequencies
        ($m\approx d_{k}/2$) are scaled similarly to PI and for high frequencies $\gamma_{m}\approx 1$.""",
    "DroPE, eq. 11": r"""
        $\gamma_{m}^{\mathrm{YaRN}}=(1-\kappa_{m})\tfrac{1}{s}+\kappa_{m},\qquad\kappa_{m}=\begin{cases}0&\omega_{m}<p\\
        1&\omega_{m}>q\\ \tfrac{\omega_{m}-p}{q-p}&p\leq\omega_{m}\leq q,\end{cases}$ [...] with tunable $p$ and $q$
        parameters, originally chosen as $p=1$, $q=32$.""",
    "DroPE, Section D.1": r"""
        Dropping PEs at step 16K (RoPE transformer, i.e., no dropping during training). [...] Consistent with this, we
        observe that dropping the positional encoding only at the very end of pretraining (DroPE @ 16K) yields the best
        validation perplexity, while earlier dropping steadily degrades performance.""",
    "DoPE, Section 4.2": r"""
        The resulting Gram matrices acquire a dominant eigenvalue that scales like $\Theta(N)$ (hence top singular
        values scale like $\Theta(\sqrt{N})$), producing a pronounced principal direction""",
    "DoPE, eq. 21 and 22": r"""
        $\psi$ is the angle between the principal left singular direction of $\mathbf{Q}^{\prime}_{f}$ and the principal
        right singular direction of $\mathbf{K}^{\prime}_{f}$ in the band plane [...] with
        $\mathbf{Q}^{\prime}_{k}\in\mathbb{R}^{m\times 2}$ and $\mathbf{K}^{\prime}_{k}\in\mathbb{R}^{n\times 2}$.""",
    "DoPE, after eq. 21": r"""
        half–angle $\gamma_{k}<\frac{\pi}{2}$ [...] if $\bar{\psi}:=\angle(u_{Q},u_{K})$ denotes the angle between the
        band-wise mean directions, then by the cone conditions $|\psi-\bar{\psi}|\leq\gamma_{Q}+\gamma_{K}$, hence
        $\cos\psi\geq\cos(\bar{\psi}+\gamma_{Q}+\gamma_{K})$.""",
    "DoPE, eq. 21 by mean directions": r"""
        $\displaystyle\gtrsim\frac{\alpha_{\min}\beta_{\min}}{\sqrt{d}}\,N\,\|q\|\,\|k\|\,\cos\gamma_{Q}\,\cos\gamma_{K}\,\cos\psi.$""",
    "DoPE, eq. 29": r"""
        Combining this with the earlier spectral bound suggests the approximate proportionality
        $\lambda_{\max}(\mathbf{\Sigma}_{h})\;\propto\;\rho^{-\mathcal{H}_{h}}.$""",
    "DoPE, eq. 30 with r = 1": r"""
        $\rho_{h}^{r}\;=\;\exp\!\Bigg(-\sum_{i=1}^{r}\frac{\lambda_{i}}{\sum_{j=1}^{r}\lambda_{j}}\log\frac{\lambda_{i}}{\sum_{j=1}^{r}\lambda_{j}}\Bigg),$
        [...] using the truncated matrix entropy with $r=1$ (which can be regarded as equivalent to the spectral norm,
        i.e., $\sigma_{max}(\mathbf{\Sigma})$) yields the best results. [...] with $k=1$ corresponding to using only the
        spectral norm $\sigma_{\max}(\mathbf{\Sigma})$.""",
    "DoPE, eq. 30": r"""
        Given eigenvalues $\lambda_{1}\geq\lambda_{2}\geq\cdots\geq\lambda_{r}$ of $\tilde{\mathbf{\Sigma}}_{h}$ and a
        threshold $r\in\{1,8,16,32,64\}$, the truncated effective rank is defined as [...] the eigenvectors
        corresponding to their full 128 hidden-dimensional eigenvalues""",
    "DoPE, Section 5.2, patterns": r"""
        Truncated matrix entropy and (vallina) matrix entropy exhibit distinctly different patterns. [...] In practice,
        we are often interested not in the full effective rank, but in its truncated version""",
    "DoPE, eq. 32 to 34": r"""
        $m_{h,f}\;=\;\mathbf{1}\!\Big[\theta_{f}\leq\theta\Big],$ [...] where $\theta$ is a threshold chosen to retain
        sufficiently isotropic bands while filtering those dominated by low-rank spikes. $\theta=\frac{2\pi}{L},$ [...]
        This operation removes coherent low-rank positional modes while preserving isotropic components that contribute
        to balanced attention""",
    "pe_notebook, table of accuracies": r"""
        def evaluate(L_train=128, L_test=12092, d=64): [...]
        labels = [f"Acc@{128} (Train)", f"Acc@{4096} (Extrapolation)"]""",
    "pe_notebook, its test": r"""
        Q = apply_rope(np.ones((L, d))) K = apply_rope(np.ones((L, d))) [...] RoPE and YaRN maintain flawless accuracy
        even at 4096 tokens—proof that their relative, rotation-based encodings inherently capture structure that
        scales.""",
    "pe_notebook, its test without encoding": r"""
        NoPE (Kazemnejad et al., 2021) removes explicit positional encodings [...] while NoPE performs perfectly within
        its familiar 128-token range, it collapses when faced with long sequences, showing it can’t generalize past
        what it’s seen.""",
    "pe_notebook, NTK-aware RoPE": r"""
        so that lower frequencies rotate more slowly [...] freqs = 1.0 / (base ** (2*i/d)) freqs = freqs * (scaling **
        (i / (d/2))) # NTK rescale""",
    "pe_notebook, YaRN, relative distances": r"""
        \[\text{YaRN}(z_i, n) = z_i \cdot e^{j n \tilde{\theta}_i(n)}.\] [...] their relative,
        rotation-based encodings""",
    "pe_notebook, YaRN, transition": r"""
        The method smoothly transitions between scales using interpolation weights, ensuring continuity at
        \(N_{\text{train}}\). [...] YaRN slightly slows the clock during training (by \(\alpha\)) to fit local contexts
        more precisely, and speeds it up (by \(\beta\)) for inference on longer sequences.""",
    "pe_notebook, NoPE": r"""
        The bias matrix \(b_{ij}\) depends only on the relative distance \((i - j)\), enabling extrapolation to longer
        contexts [...] """
    + r'''"""NoPE: absolute learned bias within training window."""''',
}

QUOTES = {source: " ".join(text.split()) for source, text in _QUOTES.items()}
