/* What moves β2: the signals of kourkoutas/signals.py, from a bucket's pooled norm to 1-β2. */

enum { SUNSPIKE, CENTRED, PREDICTIVE };
enum { FORECASTS = 8 };
static const int MEMORY[] = {0, 1, 1 + 2 * FORECASTS}; /* scalars that each keeps per bucket */
static const double DISCOUNT = 0.998, FARTHEST = 1e3, LARGEST = 1e37;

/* (1-β2_max)·((1-β2_min)/(1-β2_max))^place, which rounding must not carry past 1-β2_min. */
static double rate(double beta2_min, double beta2_max, double place) {
    double shortest = 1 - beta2_min, longest = 1 - beta2_max, c = longest * pow(shortest / longest, place);
    return c > shortest ? shortest : c;
}

typedef struct { /* the forgetting rates of "predictive": c_k and log(1 - c_k) */
    double c[FORECASTS], log_kept[FORECASTS];
} Rates;

static Rates rates_of(double beta2_min, double beta2_max) {
    Rates rates;
    for (int k = 0; k < FORECASTS; k++) {
        rates.c[k] = rate(beta2_min, beta2_max, k / (FORECASTS - 1.0));
        rates.log_kept[k] = log1p(-rates.c[k]);
    }
    return rates;
}

/* sun = max(0, (n - r/w) / (n + r/w + tiny)) with w ← α·w + (1-α), the weight that r has gathered. */
static double centred(double n, double r, double alpha, double tiny, double *w) {
    *w = alpha * *w + (1 - alpha);
    double mean = r / *w, sun = (n - mean) / (n + mean + tiny);
    return sun < 0 ? 0 : sun;
}

/* sun = Σ weight_k·place_k of the forecasts q_k of n, weighted by their scores L_k; then these see n.
   `memory` has the count of norms seen, then q, then L. */
static double predictive(double n, double tiny, const Rates *rates, double *memory) {
    double seen = memory[0], *q = memory + 1, *score = memory + 1 + FORECASTS;
    double first = 0, least = INFINITY, sum = 0, sun = 0;
    n = n > LARGEST ? 0 * n + LARGEST : n;
    for (int k = 0; k < FORECASTS && seen > 0; k++) {
        double kept = seen * rates->log_kept[k]; /* (1-c)^seen = exp(kept), which is lost beside 1 below -40 */
        double forecast = q[k] / (kept < -40 ? 1 : sqrt(-expm1(kept))) + tiny;
        double far = n / forecast, x = far < FARTHEST ? far : 0 * n + FARTHEST;
        if (k == 0) first = forecast;
        /* L_k ← discount·L_k + log(s_k/s_0) + n²/s_k */
        score[k] = DISCOUNT * score[k] + 2 * log(forecast / first) + x * x;
    }
    for (int k = 0; k < FORECASTS; k++) least = score[k] < least || score[k] != score[k] ? score[k] : least;
    for (int k = 0; k < FORECASTS; k++) {
        score[k] -= least;
        double weight = exp(-score[k] / 2);
        sum += weight;
        sun += weight * (k / (FORECASTS - 1.0));
        /* s_k ← (1-c_k)·s_k + c_k·n², divided by the larger of the two */
        double largest = (q[k] < n ? n + 0 * q[k] : q[k]) + tiny, a = q[k] / largest, b = n / largest;
        q[k] = largest * sqrt((1 - rates->c[k]) * a * a + rates->c[k] * b * b);
    }
    memory[0] = seen + 1;
    return sun / sum;
}
